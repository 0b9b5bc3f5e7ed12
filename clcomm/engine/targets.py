"""Class indices that are none: found in host arrays before a kernel runs, else when a loss that is NaN is read.

Kernels do not read outside a row for such an index: the loss is NaN, and the first one is noted in the device's memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.errors import ArgumentError

if TYPE_CHECKING:
    from clcomm.engine.device import Device

_KEY = "outside"


def note_of(device: Device) -> Any:
    """Return the buffer in which a device's kernels note an index: how many there were, one of them, the classes."""
    return device.keep(_KEY, lambda: np.zeros(3, np.int32))


def require_classes(name: str, values: np.ndarray, classes: int, ignored: int | None = None) -> None:
    """Raise ArgumentError unless integers are classes from 0 to `classes` - 1, or `ignored`."""
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
