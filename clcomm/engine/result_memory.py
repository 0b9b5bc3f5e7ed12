"""Memory of a recording's small results, such as a loss: on host arrays, used again and again.

A buffer from the pool costs a replay its allocation, a launch that looks after it, and a copy by the driver when its
value is read. On a device that takes addresses all three can be left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.host.arrays import aligned_empty
from clcomm.engine import host_addresses
from clcomm.engine.recorder import Allocation

if TYPE_CHECKING:
    from clcomm.engine.device import Device

#: Bytes of the largest result of this kind, and the most of its places: a program keeps a loss or two.
MOST_BYTES, _MOST_PLACES = 64, 4


class ResultMemory:
    """The places of one result; a place is free again when nothing else refers to its buffer.

    Args:
        nbytes: of the result.
        dtype: of its elements.
    """

    def __init__(self, device: Device, nbytes: int, dtype: np.dtype):
        self._device, self._nbytes, self._dtype = device, nbytes, dtype
        self._places: list[tuple[Allocation, Any]] = []

    @staticmethod
    def serves(device: Device, nbytes: int) -> bool:
        """Return whether results of a device of so many bytes can have such places."""
        return device.takes_addresses and nbytes <= MOST_BYTES

    def take(self) -> tuple[Any, Any]:
        """Return a buffer that nothing uses, and the kernel argument for it; a pooled one if all places are taken."""
        for place, argument in self._places:
            if place.is_unused():
                return place.owner, argument
        if len(self._places) == _MOST_PLACES:
            buffer = self._device.allocate(self._nbytes)
            return buffer, buffer
        array = aligned_empty((self._nbytes // self._dtype.itemsize,), self._dtype)
        buffer = self._device.memory.exact(on_top_of=array)
        self._places.append((Allocation(buffer, self._nbytes), host_addresses.kept_argument(self._device, buffer)))
        return buffer, self._places[-1][1]
