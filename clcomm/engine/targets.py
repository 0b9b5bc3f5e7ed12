"""Invalid class indices: rejected in host arrays before a kernel runs, else when the loss, NaN, is read.

Kernels do not read outside a row for such an index: the loss is NaN, and the first one is noted in the device's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clcomm.errors import ArgumentError

if TYPE_CHECKING:
    import pyopencl as cl

    from clcomm.engine.device import Device

_KEY = "outside"


def note_of(device: Device) -> cl.Buffer:
    """Return the buffer of invalid indices seen by a device's kernels: their number, one of them, and the classes."""
    return device.keep(_KEY, lambda: np.zeros(3, np.int32))


def require_classes(name: str, values: np.ndarray, classes: int, ignored: int | None = None) -> None:
    """Raise ArgumentError unless all integers are from 0 to `classes` - 1, or `ignored`."""
    outside = (values < 0) | (values >= classes)
    if ignored is not None:
        outside &= values != ignored
    if outside.any():
        raise ArgumentError(_message(name, values[outside].flat[0], classes))


def require_none_noted(device: Device) -> None:
    """Raise ArgumentError where a kernel has noted an index since the last call; waits for the queue."""
    buffer = device.kept.get(_KEY)
    if buffer is None:
        return
    noted = np.zeros(3, np.int32)
    device.read(buffer, noted)
    if noted[0]:
        device.write(buffer, np.zeros(3, np.int32))
        raise ArgumentError(_message("loss", noted[1], noted[2]))


def _message(name: str, got: int, classes: int) -> str:
    return f"{name}: targets must be 0 to {classes - 1}, got {got}"
