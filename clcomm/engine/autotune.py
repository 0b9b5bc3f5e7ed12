"""Finds the sizes that suit a device by measuring them: what `clcomm tune-kernels` does.

Sizes are tried one after another, each with those before it already chosen. Candidates take turns, and each counts with
its fastest run, so that what else the machine does tells little. A candidate that gives other bits than the built-in
size is out, however fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.ops.matmul import multiply
from clcomm.engine.tensor import Tensor
from clcomm.engine.tuning import Tuning, Value, choices, defaults
from clcomm.errors import ClcommError

if TYPE_CHECKING:
    import pyopencl as cl

_ROUNDS = 12
_WORTH_CHANGING = 0.97  # of the built-in size's time: less of a gain is noise

#: Runs once and returns the results.
Run = Callable[[], list[Tensor]]


class Work(NamedTuple):
    """Something to measure: what makes it run on a device, and the kernels whose time counts."""

    make: Callable[[Device], Run]
    kernels: tuple[str, ...]


class Trial(NamedTuple):
    """What came of trying a size: its time relative to the built-in one's, if it runs, and what speaks against it."""

    name: str
    value: Value
    time: float | None
    problem: str = ""


def search(
    cl_device: cl.Device, kind: str, *, rounds: int = _ROUNDS, works: Mapping[str, list[Work]] | None = None
) -> Iterator[tuple[Tuning, list[Trial]]]:
    """Yield, after each size, what is chosen so far and the size's trials; the last one yielded is the result."""
    tuning = defaults(cl_device)
    for name, values in choices(kind).items():
        built_in = getattr(tuning, name)
        order = (built_in, *(value for value in values if value != built_in))
        candidates = {value: replace(tuning, **{name: value}) for value in order}

        def tried(*values: Value, name: str = name, candidates: dict[Value, Tuning] = candidates) -> list[Trial]:
            some = {value: candidates[value] for value in values}
            times = _measured(cl_device, kind, some, (works or WORKS)[name], rounds)
            return [Trial(name, value, *times[value]) for value in values]

        trials = tried(*order)
        chosen = fastest(trials)
        # Once more in other memory: where buffers happen to lie can matter more than a size.
        if chosen != built_in and fastest(tried(built_in, chosen)) != chosen:
            trials = [trial._replace(problem="not again") if trial.value == chosen else trial for trial in trials]
            chosen = built_in
        tuning = candidates[chosen]
        yield tuning, trials


def fastest(trials: list[Trial]) -> Value:
    """Return the fastest value, or the first, which is the built-in one, unless that saves enough to be no accident."""
    valid = [trial for trial in trials[1:] if trial.time is not None and trial.time < _WORTH_CHANGING]
    return min(valid, key=lambda trial: trial.time or math.inf, default=trials[0]).value


def _measured(
    cl_device: cl.Device, kind: str, candidates: dict[Value, Tuning], works: list[Work], rounds: int
) -> dict[Value, tuple[float | None, str]]:
    """Return (relative time, problem) of each candidate; the first one is the built-in."""
    import pyopencl as cl

    problems: dict[Value, str] = {}
    runners: dict[Value, _Runner] = {}
    for value, tuning in candidates.items():
        try:
            runner = _Runner(Device(cl_device, kind=kind, tuning=tuning), works)
        except (ClcommError, cl.Error, MemoryError) as error:
            problems[value] = f"does not run: {' '.join(str(error).split())[:120]}"
            continue
        if runners and runner.bits != next(iter(runners.values())).bits:
            problems[value] = "gives other bits"
        else:
            runners[value] = runner
    for _ in range(rounds):
        for runner in runners.values():
            runner.measure()
    first = next(iter(runners.values()), None)
    return {
        value: (runners[value].relative_to(first), "") if value in runners and first else (None, problems[value])
        for value in candidates
    }


class _Runner:
    """Some works on one device, and the least time that each ever took."""

    def __init__(self, device: Device, works: list[Work]):
        self.device = device
        self.runs = [(work.make(device), work.kernels) for work in works]
        self.bits = [tensor.numpy().tobytes() for run, _ in self.runs for tensor in run()]
        self.seconds = [math.inf] * len(works)

    def measure(self) -> None:
        for index, (run, kernels) in enumerate(self.runs):
            with self.device.profile() as profile:
                run()
            seconds = sum(launch.seconds for launch in profile.launches if launch.name in kernels)
            self.seconds[index] = min(self.seconds[index], seconds)

    def relative_to(self, other: _Runner) -> float:
        """Return the geometric mean, over the works, of the times as shares of another's."""
        ratios = [max(own, 1e-9) / max(their, 1e-9) for own, their in zip(self.seconds, other.seconds, strict=True)]
        return math.prod(ratios) ** (1 / len(ratios))


def _tensor(device: Device, *shape: int, needs: bool = False) -> Tensor:
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return Tensor(values, device, requires_grad=needs)


def product(variant: str, m: int, n: int, k: int) -> Work:
    """Return the product of an m x k and a k x n matrix, as `variant` (NN, NT, TN) says how they lie."""

    def make(device: Device) -> Run:
        turn_a, turn_b = (letter == "T" for letter in variant)
        a = _tensor(device, *((k, m) if turn_a else (m, k)))
        b = _tensor(device, *((n, k) if turn_b else (k, n)))
        out = _tensor(device, m, n)

        def run() -> list[Tensor]:
            multiply(a, b, out, transpose_a=turn_a, transpose_b=turn_b)
            return [out]

        return run

    return Work(make, ("gemm", "gemm_few_rows", "gemm_few_rows_turned", "transpose"))


def convolution(images: int, channels: int, side: int, outputs: int, kernels: tuple[str, ...]) -> Work:
    """Return a 3 x 3 convolution with its gradients."""

    def make(device: Device) -> Run:
        x = _tensor(device, images, channels, side, side, needs=True)
        weight = _tensor(device, outputs, channels, 3, 3, needs=True)
        gradient = _tensor(device, images, outputs, side, side)

        def run() -> list[Tensor]:
            x.grad = weight.grad = None
            y = F.conv2d(x, weight, None, padding=1)
            y.backward(gradient)
            grads: list[Any] = [x.grad, weight.grad]
            return [y, *grads]

        return run

    return Work(make, kernels)


def elementwise(count: int) -> Work:
    """Return a product of so many elements."""

    def make(device: Device) -> Run:
        a, b = _tensor(device, count), _tensor(device, count)
        return lambda: [F.mul(a, b)]

    return Work(make, ("mul",))


_PRODUCTS = [product("NT", 64, 128, 1568), product("TN", 128, 1568, 64), product("NN", 512, 512, 512)]
_CONVOLUTION = (64, 16, 14, 32)
#: What each size is measured on: the shapes of the models, and larger ones.
WORKS: dict[str, list[Work]] = {
    "gemm_tile": _PRODUCTS,
    "transpose_from": [product("TN", side, side, side) for side in (128, 256, 512)],
    "near_cache": [
        convolution(*_CONVOLUTION, ("weight_gradient",)),
        convolution(16, 64, 28, 64, ("weight_gradient",)),
    ],
    "gemm_block": [*_PRODUCTS, product("NN", 1024, 1024, 1024)],
    "group": [elementwise(1 << 16), elementwise(1 << 22)],
    "conv_outputs": [convolution(*_CONVOLUTION, ("convolve", "weight_gradient"))],
}
