"""Every specialised kernel over its family of cases, in memory where a read or a write outside a buffer shows.

A sample runs by default; CLCOMM_FAMILY_CASES is how many cases of each family to draw (`make families` draws them all).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clcomm.engine import Conv2d, Module, Replay, Tensor, no_grad
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.ops import convolution
from clcomm.engine.tuning import Tuning, choices
from tests.calling_thread import pass_in_the_calling_thread
from tests.families import convolutions, elements, host, products
from tests.families.every import ALSO_WIDE, FAMILIES, WIDE, WIDE_FAMILIES
from tests.families.family import Family, leaf, whole_numbers
from tests.families.memory import GuardedMemory, guarded
from tests.helpers import cpu_device, cpus_own
from tests.sampling import is_whole_suite

CASES = int(os.environ.get("CLCOMM_FAMILY_CASES", 16))
LONGEST = 34
pytestmark = pytest.mark.timeout(0 if CASES > 30 else 600)

#: For each size that a device may be tuned in, the families whose kernels it changes.
TUNED: dict[str, tuple[Family, ...]] = {
    "gemm_tile": (products.PLAIN_PRODUCT,),  # convolutions as products have the same bits with all (tests/engine)
    "transpose_from": (products.PLAIN_PRODUCT,),
    "near_cache": (convolutions.CONVOLUTION,),
    "conv_lanes": (convolutions.CONVOLUTION,),
    "loop_lanes": (elements.ARITHMETIC, elements.ACTIVATIONS, elements.OPTIMIZERS),
    "gemm_block": (products.PLAIN_PRODUCT,),
    "group": (elements.ARITHMETIC,),
    "conv_outputs": (convolutions.CONVOLUTION,),
}


def _guarded(kind: str, tuning: Tuning | None = None) -> Device:
    tested = cpus_own() if kind == "cpu" else cpu_device("cpu")  # a GPU runs none of the CPU's kernels
    return guarded(Device(tested.cl_device, kind=kind, tuning=tuning or Tuning()))


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Device:
    """The CPU with the kernels of a kind, in guarded memory."""
    return _guarded(request.param)


def check(device: Device, family: Family, count: int) -> None:
    """Check so many cases of a family."""
    assert isinstance(device.memory, GuardedMemory)
    case = None
    try:
        for case in family.cases(np.random.default_rng(0), count, LONGEST):
            family.check(device, case)
            device.memory.check()
    except AssertionError as error:
        raise AssertionError(f"{family.name}: {case}: {error}") from None


@pytest.mark.sampled(None)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_agrees_with_float64(device: Device, name: str, request: pytest.FixtureRequest) -> None:
    if not FAMILIES[name].suits(device):
        pytest.skip("the family is for other devices")
    check(device, FAMILIES[name], min(CASES, 6) if is_whole_suite(request.config) else CASES)


def test_the_families_of_the_host_agree_in_the_calling_thread(device: Device) -> None:
    """Their kernels are built otherwise there."""
    if device.runs_in_caller or device.kind == "gpu":
        pytest.skip("they are above, or for CPUs alone")
    chosen = " or ".join(family.name for family in (host.RENDEZVOUS, host.FOLD, host.GATHER))
    pass_in_the_calling_thread(
        device, __file__, f"agrees_with_float64 and cpu and ({chosen} or shared) and not 16 and not tuning"
    )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", (*WIDE_FAMILIES, *ALSO_WIDE))
def test_a_family_in_vectors_of_16_agrees_with_float64(name: str) -> None:
    check(_guarded("cpu", WIDE), FAMILIES[name], CASES // 2)


def _tunings() -> Iterator[Any]:
    for kind in ("cpu", "gpu"):
        for name, values in choices(kind).items():
            for value in values[1:]:
                yield pytest.param(kind, name, value, id=f"{name}={value}")


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("kind", "name", "value"), list(_tunings()))
def test_a_family_agrees_with_float64_whatever_the_tuning(kind: str, name: str, value: Any) -> None:
    tuned = _guarded(kind, replace(Tuning(), **{name: value}))
    tuned.compute_units = 1  # one group of a product's largest block is enough
    for family in TUNED[name]:
        check(tuned, family, CASES // 2)


class _TwoConvolutions(Module):
    def __init__(self, device: Device, case: convolutions.Case):
        kernel = case.rows.kernel, case.columns.kernel
        self.first = Conv2d(case.channels, 3, 1, device=device)
        self.second = Conv2d(3, case.outputs, kernel, padding=case.padding, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_replayed_convolution_has_the_bits_of_the_plain_one(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_WORTH_A_BUILD", 0)
    for case in convolutions.of_one_width(np.random.default_rng(0), CASES // 3, LONGEST):
        model = _TwoConvolutions(device, case)
        space = model.flat_space()

        def step(x: Tensor, model: Module = model) -> Tensor:
            y = model(x)
            F.sum(y * y).backward()
            return y

        replay = Replay(step)
        x = leaf(device, whole_numbers(case.seed, case.images, case.channels, case.rows.size, case.columns.size), False)
        runs = []
        for _ in range(4):  # as it is, recorded, compared with the recording, replayed
            with no_grad():
                model.zero_grad()
            y = replay(x)
            runs.append((y.numpy().tobytes(), *(p.grad.numpy().tobytes() for p in model.parameters())))
        assert replay.replayed == 1 and len(set(runs)) == 1, case
        assert space.device is device
        device.memory.check()


def test_guarded_memory_shows_reads_and_writes_outside_a_buffer(device: Device) -> None:
    cpus_own()  # guards lie in the host's memory
    x, out = leaf(device, np.ones(5, np.float32), False), leaf(device, np.ones(7, np.float32), False)
    copy = device.kernel("elementwise", "copy")
    device.launch(copy, *device.grid(6), out, x, 6)
    np.testing.assert_array_equal(out.numpy(), [1, 1, 1, 1, 1, np.nan, 1])
    device.memory.check()
    x, out = (leaf(device, np.ones(n, np.float32), False) for n in (7, 5))
    device.launch(copy, *device.grid(6), out, x, 6)
    with pytest.raises(AssertionError, match="a kernel wrote outside a buffer of 20 bytes"):
        device.memory.check()


def test_a_case_that_is_wrong_is_named() -> None:
    def fail(device: Device, case: int) -> None:
        assert case < 3, "too large"

    family = Family("numbers", lambda rng, count, longest: iter(range(count)), fail)
    with pytest.raises(AssertionError, match=r"^numbers: 3: too large"):
        check(_guarded("cpu"), family, 5)
