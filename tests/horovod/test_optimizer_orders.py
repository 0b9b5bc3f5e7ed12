"""Backward, synchronize, skip_synchronize, step and accumulation in drawn orders: the gradients of a formula."""

from __future__ import annotations

import os
import random
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.mpi(min_size=1)

LR = 0.125


def orders(draw: random.Random, passes: int) -> list[str]:
    """Return calls that are allowed: at most `passes` backwards before a reduction, none in flight at a skipped one."""
    calls, left = [], passes
    for _ in range(24):
        is_under_way = left < passes
        allowed = [*["backward"] * 3 * (left > 0), "synchronize", "step", *["skip", "zero"] * (not is_under_way)]
        calls.append(draw.choice(allowed))
        left = left - 1 if calls[-1] == "backward" else passes if calls[-1] in ("synchronize", "step") else left
    return calls


class ByFormula:
    """The ranks' weight and gradients as whole numbers in float64, of which each mean is exact."""

    def __init__(self, size: int, average: bool):
        self.weight, self.gradients = 1.0, [0.0] * size
        self.divisor = size if average else 1
        self.is_reduced = self.is_under_way = False

    def backward(self, values: list[float]) -> None:
        self.gradients = [old + new for old, new in zip(self.gradients, values, strict=True)]
        self.is_under_way = True

    def synchronize(self) -> None:
        self.gradients = [sum(self.gradients) / self.divisor] * len(self.gradients)
        self.is_reduced, self.is_under_way = True, False

    def step(self) -> None:
        if self.is_under_way or not self.is_reduced:
            self.synchronize()
        self.skip()

    def skip(self) -> None:
        self.weight -= LR * self.gradients[0]
        self.is_reduced = False

    def zero(self) -> None:
        self.gradients = [0.0] * len(self.gradients)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("average", [True, False])
def test_drawn_orders_are_the_formula(hvd, average, passes):
    for case in range(int(os.environ.get("CLCOMM_HOROVOD_ORDERS", "4"))):
        draw = random.Random(f"{case} {passes} {hvd.size()}")
        weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        base = torch.optim.SGD([weight], LR)
        op = hvd.Average if average else hvd.Sum
        optimizer = hvd.DistributedOptimizer(base, op=op, backward_passes_per_step=passes)
        expected, calls = ByFormula(hvd.size(), average), orders(draw, passes)
        for call in calls:
            if call == "backward":
                values = [float(draw.randrange(-8, 8)) * hvd.size() for _ in range(hvd.size())]
                (weight * values[hvd.rank()]).sum().backward()
                expected.backward(values)
            elif call == "skip":
                with optimizer.skip_synchronize():
                    optimizer.step()
                expected.skip()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a step after synchronize()
                    {"synchronize": optimizer.synchronize, "step": optimizer.step, "zero": optimizer.zero_grad}[call]()
                getattr(expected, call)()
            assert weight.item() == pytest.approx(expected.weight, rel=1e-12), (case, calls, call)


@pytest.mark.mpi(min_size=2)
def test_a_backward_of_one_rank_after_synchronize_is_reduced_on_all(hvd):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
    weight.sum().backward()
    optimizer.synchronize()
    if hvd.rank() == 0:
        weight.sum().backward()
    optimizer.step()
    assert weight.item() == pytest.approx(-1.0 / hvd.size(), abs=1e-6)


@pytest.mark.mpi(min_size=2)
def test_a_backward_before_a_skipped_reduction_is_refused(hvd):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
    for closure in (None, lambda: weight.sum().backward()):
        weight.sum().backward()
        optimizer.synchronize()
        if closure is None:
            weight.sum().backward()
        with (
            optimizer.skip_synchronize(),
            pytest.raises(AssertionError, match="skip_synchronize: expected synchronize"),
        ):
            optimizer.step(closure)
        optimizer.synchronize()
    assert weight.item() == 1.0
