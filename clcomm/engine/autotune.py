"""Auto-tuning of kernel sizes on a device, for `clcomm tune-kernels`.

Sizes are tried one after another, with the earlier ones already chosen. Candidates take turns, and each counts with its
fastest run, so that other load on the machine matters little. A candidate whose results differ in any bit from the
built-in size's is rejected.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clcomm.base.errors import ClcommError
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, MaxPool2d, ReLU, Sequential
from clcomm.engine.ops.matmul import multiply
from clcomm.engine.replay import Replay
from clcomm.engine.tensor import Tensor
from clcomm.engine.tuning import Tuning, Value, choices, defaults

if TYPE_CHECKING:
    import pyopencl as cl

_ROUNDS = 12
_WORTH_CHANGING = 0.97  # of the built-in size's time; a smaller gain is noise

#: A function that runs a workload once and returns its results.
Run = Callable[[], list[Tensor]]


class Workload(NamedTuple):
    """A function that prepares a workload on a device, and the kernels to time."""

    make: Callable[[Device], Run]
    kernels: tuple[str, ...]


class SizeTrial(NamedTuple):
    """The result of a size: its time relative to the built-in size's, or the reason for its rejection."""

    name: str
    value: Value
    time: float | None
    problem: str = ""


def search(
    cl_device: cl.Device, kind: str, *, rounds: int = _ROUNDS, workloads: Mapping[str, list[Workload]] | None = None
) -> Iterator[tuple[Tuning, list[SizeTrial]]]:
    """Yield, after each size, the choices so far and the size's trials; the last choices are the result.

    Args:
        kind: "cpu", "gpu" or "accelerator"; selects the kernels.
        rounds: measurements of each candidate.
        workloads: by the name of a size; WORKLOADS by default.
    """
    tuning = defaults(cl_device)
    for name, values in choices(kind).items():
        built_in = getattr(tuning, name)
        order = (built_in, *(value for value in values if value != built_in))
        candidates = {value: replace(tuning, **{name: value}) for value in order}

        def trials_of(
            *values: Value, name: str = name, candidates: dict[Value, Tuning] = candidates
        ) -> list[SizeTrial]:
            some = {value: candidates[value] for value in values}
            times = _measured(cl_device, kind, some, (workloads or WORKLOADS)[name], rounds)
            return [SizeTrial(name, value, *times[value]) for value in values]

        trials = trials_of(*order)
        chosen = fastest(trials)
        # A winner is measured again in other memory, as the addresses of buffers can matter more than a size.
        if chosen != built_in and fastest(trials_of(built_in, chosen)) != chosen:
            trials = [trial._replace(problem="not again") if trial.value == chosen else trial for trial in trials]
            chosen = built_in
        tuning = candidates[chosen]
        yield tuning, trials


def fastest(trials: list[SizeTrial]) -> Value:
    """Return the fastest value; the first trial's, the built-in one, unless the gain exceeds noise."""
    valid = [trial for trial in trials[1:] if trial.time is not None and trial.time < _WORTH_CHANGING]
    return min(valid, key=lambda trial: trial.time or math.inf, default=trials[0]).value


def _measured(
    cl_device: cl.Device, kind: str, candidates: dict[Value, Tuning], workloads: list[Workload], rounds: int
) -> dict[Value, tuple[float | None, str]]:
    """Return (time relative to the first, problem) of each candidate; the first is the built-in one."""
    import pyopencl as cl

    problems: dict[Value, str] = {}
    runners: dict[Value, _Runner] = {}
    for value, tuning in candidates.items():
        try:
            runner = _Runner(Device(cl_device, kind=kind, tuning=tuning), workloads)
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
    """Workloads on one device, and the shortest time of each."""

    def __init__(self, device: Device, workloads: list[Workload]):
        self.device = device
        self.runs = [(each.make(device), each.kernels) for each in workloads]
        self.bits = [tensor.numpy().tobytes() for run, _ in self.runs for tensor in run()]
        self.seconds = [math.inf] * len(workloads)

    def measure(self) -> None:
        for index, (run, kernels) in enumerate(self.runs):
            with self.device.profile() as profile:
                run()
            seconds = sum(launch.seconds for launch in profile.launches if launch.name in kernels)
            self.seconds[index] = min(self.seconds[index], seconds)

    def relative_to(self, other: _Runner) -> float:
        """Return the geometric mean of the workloads' times relative to another runner's."""
        ratios = [max(own, 1e-9) / max(their, 1e-9) for own, their in zip(self.seconds, other.seconds, strict=True)]
        return math.prod(ratios) ** (1 / len(ratios))


def _tensor(device: Device, *shape: int, needs: bool = False) -> Tensor:
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return Tensor(values, device, requires_grad=needs)


def product(variant: str, m: int, n: int, k: int) -> Workload:
    """Return the workload of a product of an m x k and a k x n matrix; `variant` is NN, NT or TN, T for transposed."""

    def make(device: Device) -> Run:
        transpose_a, transpose_b = (letter == "T" for letter in variant)
        a = _tensor(device, *((k, m) if transpose_a else (m, k)))
        b = _tensor(device, *((n, k) if transpose_b else (k, n)))
        out = _tensor(device, m, n)

        def run() -> list[Tensor]:
            multiply(a, b, out, transpose_a=transpose_a, transpose_b=transpose_b)
            return [out]

        return run

    return Workload(make, ("gemm", "gemm_few_rows", "gemm_few_rows_transposed", "transpose"))


def convolution(images: int, channels: int, side: int, outputs: int, kernels: tuple[str, ...]) -> Workload:
    """Return the workload of a 3 x 3 convolution of `side` x `side` images with its gradients; `kernels` are timed."""

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

    return Workload(make, kernels)


def elementwise(count: int) -> Workload:
    """Return the workload of an elementwise product of `count` elements."""

    def make(device: Device) -> Run:
        a, b = _tensor(device, count), _tensor(device, count)
        return lambda: [F.mul(a, b)]

    return Workload(make, ("mul",))


_PRODUCTS = [product("NT", 64, 128, 1568), product("TN", 128, 1568, 64), product("NN", 512, 512, 512)]
_CONVOLUTION = (64, 16, 14, 32)
#: The workloads of each size: shapes of the models in models/, and larger ones.
WORKLOADS: dict[str, list[Workload]] = {
    "gemm_tile": _PRODUCTS,
    "transpose_from": [product("TN", side, side, side) for side in (128, 256, 512)],
    "near_cache": [
        convolution(*_CONVOLUTION, ("weight_gradient",)),
        convolution(16, 64, 28, 64, ("weight_gradient",)),
    ],
    "conv_lanes": [
        convolution(*_CONVOLUTION, ("convolve", "weight_gradient")),
        convolution(16, 64, 14, 64, ("convolve", "weight_gradient")),
    ],
    "loop_lanes": [elementwise(1 << 11), elementwise(1 << 16)],
    "gemm_block": [*_PRODUCTS, product("NN", 1024, 1024, 1024)],
    "group": [elementwise(1 << 16), elementwise(1 << 22)],
    "conv_outputs": [convolution(*_CONVOLUTION, ("convolve", "weight_gradient"))],
}


# --- Training speed of devices: steps of a small convolutional network, timed in turns. ---

_BATCH, _SIDE, _CLASSES = 64, 28, 10
_WINDOWS, _WINDOW_S = 7, 0.1


def training_rates(devices: Sequence[Device]) -> list[float]:
    """Return each device's images per second in computing a small network's loss and gradients.

    Takes seconds, and some more where kernels are not built yet. Raises DeviceError where a kernel does not build.
    """
    steps = [_make_step(device) for device in devices]
    for step in steps:
        step(3)  # builds kernels, and records
    counts = [max(1, round(_WINDOW_S / _seconds(step, 2) * 2)) for step in steps]
    times: list[list[float]] = [[] for _ in devices]
    for _ in range(_WINDOWS):
        for step, count, found in zip(steps, counts, times, strict=True):
            found.append(_seconds(step, count) / count)
    return [_BATCH / statistics.median(found) for found in times]


def _make_step(device: Device) -> Callable[[int], None]:
    """Return a function that computes gradients repeatedly and blocks."""
    model = Sequential(
        Conv2d(1, 16, 3, padding=1, device=device), ReLU(), MaxPool2d(2),
        Conv2d(16, 32, 3, padding=1, device=device), ReLU(), MaxPool2d(2),
        Flatten(), Linear(32 * (_SIDE // 4) ** 2, 128, device=device), ReLU(), Linear(128, _CLASSES, device=device),
    )  # fmt: skip
    model.flat_space()
    loss_of, rng = CrossEntropyLoss(), np.random.default_rng(0)
    images = Tensor(rng.standard_normal((_BATCH, 1, _SIDE, _SIDE), np.float32), device)
    labels = Tensor(rng.integers(0, _CLASSES, _BATCH).astype(np.int32), device)

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    replay = Replay(gradients)

    def run(count: int) -> None:
        for _ in range(count):
            model.zero_grad()
            replay(images, labels)
        device.finish()

    return run


def _seconds(step: Callable[[int], None], count: int) -> float:
    begin = time.perf_counter()
    step(count)
    return time.perf_counter() - begin
