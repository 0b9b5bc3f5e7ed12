"""SyncBatchNorm: ranks with parts of a batch have the statistics and gradients of one rank with all of it."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.engine import (
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    CrossEntropyLoss,
    Linear,
    ReLU,
    Sequential,
    Tensor,
    manual_seed,
)
from clcomm.engine.nn import Module
from clcomm.parallel import DistributedDataParallel, SyncBatchNorm
from tests.helpers import one_line

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(params=["auto", "mpi"])
def ranks(request):
    comm = Communicator(transport=request.param)
    yield comm
    if not request.node.has_failed:
        comm.finalize()


def drawn(seed, shape) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2 + 1


def cases() -> list[dict]:
    """Draw shapes, settings and parts of every kind."""
    rng, found = np.random.default_rng(5), []
    for number in range(18):
        sides = tuple(int(n) for n in rng.integers(1, 5, (0, 1, 2, 3)[number % 4]))
        found.append({
            "channels": int(rng.integers(1, 7)), "sides": sides, "most": int(rng.integers(1, 5)), "seed": number,
            "settings": {
                "affine": bool(number % 3), "track_running_stats": number % 5 > 0, "eps": 0.01,
                "momentum": (0.1, None, 0.5)[number % 3],
            },
        })  # fmt: skip
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case["seed"]))
def test_ranks_normalise_as_one_rank_with_the_whole_batch(ranks, case):
    """Against float64: results, gradients and running statistics; ranks' parts of the batch differ in size."""
    channels, seed = case["channels"], case["seed"]
    counts = [1 + (seed + rank * case["most"]) % case["most"] for rank in range(ranks.size)]
    if sum(counts) * int(np.prod(case["sides"])) == 1:
        counts[0] += 1
    steps, settings = 2, case["settings"]
    layer = SyncBatchNorm(channels, **settings, comm=ranks)
    weight, bias = drawn([seed, 1], channels), drawn([seed, 2], channels)
    if settings["affine"]:
        layer.load_state_dict({**layer.state_dict(), "weight": weight, "bias": bias})
    means, variances = np.zeros(channels), np.ones(channels)
    begin, own = sum(counts[: ranks.rank]), counts[ranks.rank]
    for step in range(steps):
        x = drawn([seed, 3, step], (sum(counts), channels, *case["sides"]))
        up = drawn([seed, 4, step], x.shape)
        part = slice(begin, begin + own)
        given = Tensor(x[part], requires_grad=True)
        y = layer(given)
        for parameter in layer.parameters():
            parameter.grad = None
        y.backward(Tensor(up[part]))
        axes = (0, *range(2, x.ndim))
        wide = (channels,) + (1,) * (x.ndim - 2)
        exact, gradient = x.astype(np.float64), up.astype(np.float64)
        mean, variance = exact.mean(axes), exact.var(axes)
        scale = (1 / np.sqrt(variance + 0.01)).reshape(wide)
        normal = (exact - mean.reshape(wide)) * scale
        factor, shift = (weight.reshape(wide), bias.reshape(wide)) if settings["affine"] else (1.0, 0.0)
        np.testing.assert_allclose(y.numpy(), (normal * factor + shift)[part], rtol=1e-4, atol=2e-4)
        slopes = (gradient * normal).mean(axes).reshape(wide)
        dx = scale * factor * (gradient - gradient.mean(axes).reshape(wide) - normal * slopes)
        np.testing.assert_allclose(given.grad.numpy(), dx[part], rtol=1e-3, atol=1e-3)
        if settings["affine"]:  # of this rank's part: DistributedDataParallel averages them
            np.testing.assert_allclose(layer.bias.grad.numpy(), gradient[part].sum(axes), rtol=1e-3, atol=1e-3)
            expected = (gradient * normal)[part].sum(axes)
            np.testing.assert_allclose(layer.weight.grad.numpy(), expected, rtol=1e-3, atol=2e-3)
        share = 1 / (step + 1) if settings["momentum"] is None else settings["momentum"]
        means = (1 - share) * means + share * mean
        variances = (1 - share) * variances + share * exact.var(axes, ddof=1)
    if settings["track_running_stats"]:
        np.testing.assert_allclose(layer.running_mean.numpy(), means, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(layer.running_var.numpy(), variances, rtol=1e-4, atol=1e-4)
        assert layer.num_batches_tracked.numpy() == steps
        layer.eval()
        inner = np.sqrt(layer.running_var.numpy().astype(np.float64) + 0.01).reshape(wide)
        normal = (exact - layer.running_mean.numpy().reshape(wide)) / inner
        np.testing.assert_allclose(
            layer(Tensor(x[part])).numpy(), (normal * factor + shift)[part], rtol=1e-4, atol=1e-4
        )


def network() -> Module:
    manual_seed(3)  # earlier tests have drawn other numbers on each rank
    return Sequential(
        Conv2d(2, 4, 3, padding=1), BatchNorm2d(4), ReLU(),
        Sequential(Conv2d(4, 3, 3, 2), BatchNorm2d(3, momentum=None)), Flat(),
        Linear(12, 6), BatchNorm1d(6), ReLU(), Linear(6, 5),
    )  # fmt: skip


class Flat(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1)


@pytest.mark.mpi(min_size=2)
def test_samples_that_come_after_backward_are_refused_on_every_rank_where_they_differ(ranks):
    model = SyncBatchNorm.convert_sync_batchnorm(network(), ranks)
    ddp, plain = DistributedDataParallel(model, ranks), DistributedDataParallel(network(), ranks)

    def step(of, count: int, samples: float | None) -> str:
        CrossEntropyLoss()(of(Tensor(drawn([13, ranks.rank], (count, 2, 6, 6)))), Tensor(np.zeros(count, np.int32))
                           ).backward()  # fmt: skip
        try:
            of.finish_grad_sync(samples=samples)
        except ArgumentError as error:
            return str(error)
        return ""

    sizes = [2 + rank for rank in range(ranks.size)]
    text = step(ddp, sizes[ranks.rank], sizes[ranks.rank])
    assert text == (
        "samples: expected them before backward, by expect_samples(), as SyncBatchNorm's backward adds up the ranks' "
        f"gradients, got {', '.join(map(str, sizes))} on ranks 0 to {ranks.size - 1} after it"
    )
    assert step(ddp, 3, 3) == step(ddp, sizes[ranks.rank], None) == step(plain, sizes[ranks.rank], ranks.rank + 1) == ""
    with pytest.raises(ArgumentError, match="samples: expected some on every rank with SyncBatchNorm") as caught:
        ddp.expect_samples(ranks.rank)
    one_line(caught)
    ddp.expect_samples(2)
    assert "samples: expected None after expect_samples()" in step(ddp, 2, 2)
    model.eval()  # nothing is mixed
    ddp.finish_grad_sync()
    assert step(ddp, sizes[ranks.rank], sizes[ranks.rank]) == ""


def test_bad_use_is_refused(ranks):
    with pytest.raises(ArgumentError) as caught:
        SyncBatchNorm(3, comm="dp")
    assert one_line(caught) == "comm: expected a Communicator, such as mesh['dp'], got str"
    layer = SyncBatchNorm(3, comm=ranks)
    with pytest.raises(ArgumentError, match="SyncBatchNorm: expected x of 2 or 3 or 4 or 5 dimensions with 3 channels"):
        layer(Tensor(np.ones((2, 4), np.float32)))
    single = SyncBatchNorm.convert_sync_batchnorm(BatchNorm1d(3), ranks)
    assert isinstance(single, SyncBatchNorm)
    if ranks.size == 1:
        with pytest.raises(ArgumentError, match="expected more than one element a channel"):
            single(Tensor(np.ones((1, 3), np.float32)))
