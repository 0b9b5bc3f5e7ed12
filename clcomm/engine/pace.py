"""Training speed of devices: steps of a small convolutional network, timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from clcomm.engine.device import Device
from clcomm.engine.nn import Conv2d, CrossEntropyLoss, Flatten, Linear, MaxPool2d, ReLU, Sequential
from clcomm.engine.replay import Replay
from clcomm.engine.tensor import Tensor

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
