"""Invalid class indices: rejected in host arrays before a kernel runs, else when the loss or its gradients are used.

Kernels do not read outside a row for such an index: the loss and the row's gradient are NaN, and the first one is noted
in the device's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError

if TYPE_CHECKING:
    import pyopencl as cl

    from clcomm.engine.device import Device

#: The end of the message about a target outside the classes.
OUTSIDE = "targets must be 0 to {}, got {}"


def note_of(device: Device) -> cl.Buffer:
    """Return the buffer of invalid indices seen by a device's kernels: their number, one of them, and the classes,
    negative where they are of a table's rows or a dimension's elements."""
    if device.outside is None:
        device.outside = device.keep("outside", lambda: np.zeros(3, np.int32))
    buffer: cl.Buffer = device.outside
    return buffer


def require_below(said: str, given: Any, count: int, ignored: int | None = None, *, scores: Any = None) -> bool:
    """Raise ArgumentError unless all integers are from 0 to `count` - 1, or `ignored`.

    Args:
        said: the message, with places for the largest allowed one and the one that came.
        given: an array, or a tensor, of which the host may know the smallest and the largest.
        scores: what the integers are targets of; its gradients are not used before it is known that they are classes.

    Returns whether it is known that there are no others.
    """

    def rule(values: Sequence[int]) -> bool:
        for value in values:
            if not 0 <= value < count and value != ignored:
                raise ArgumentError(said.format(count - 1, value))
        return len(values) > 0 and values[-1] < count  # else it is ignored, and others may be below it

    if not isinstance(given, np.ndarray):
        is_known: bool = given.decided(rule)
        if not is_known and scores is not None and scores.requires_grad:
            given.device.in_doubt = True
            if given.device.recorder is not None:
                given.device.recorder.in_doubt = True
        return is_known
    outside = given[(given < 0) | (given >= count)]
    rule((outside if ignored is None else outside[outside != ignored])[:1].tolist())
    return True


def require_none_noted(device: Device) -> None:
    """Raise ArgumentError where a kernel has noted an index since the last call; waits for the queue."""
    device.in_doubt = False
    if device.outside is None:
        return
    noted = np.zeros(3, np.int32)
    device.read(device.outside, noted)
    if noted[0]:
        device.write(device.outside, np.zeros(3, np.int32))
        if not noted[2]:
            raise ArgumentError("int: expected floats within int32 to convert, got others, or NaN")
        if noted[2] < 0:
            raise ArgumentError(f"index: expected 0 to {-noted[2] - 1}, got {noted[1]}")
        raise ArgumentError(f"loss: {OUTSIDE.format(noted[2] - 1, noted[1])}")
