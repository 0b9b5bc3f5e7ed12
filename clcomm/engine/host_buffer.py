"""A buffer with a host array of the same contents, for data that other ranks write or read."""

from __future__ import annotations

import math

import numpy as np

from clcomm.base.host.arrays import PAGE, aligned_empty
from clcomm.engine.device import HOST_POINTER_ALIGNMENT, Device
from clcomm.engine.tensor import Shape, Tensor, wrap


class HostBuffer:
    """Device memory for float32 on top of a host array, or beside it where the device cannot use it.

    Args:
        array: contiguous bytes.
        sees_writes: the result of `sees_writes(device)`.
    """

    def __init__(self, device: Device, array: np.ndarray, sees_writes: bool):
        self._device, self.array = device, array
        self.values = array.view(np.float32)
        self._is_on_top = sees_writes and array.ctypes.data % HOST_POINTER_ALIGNMENT == 0
        memory = device.memory
        self._buffer = memory.exact(on_top_of=array) if self._is_on_top else memory.exact(copy_of=array)

    def tensor(self, first: int, shape: Shape) -> Tensor:
        """Return the elements from `first` on, which begins where the device can make sub-buffers, as a tensor."""
        part = self._buffer.get_sub_region(4 * first, 4 * math.prod(shape))
        return wrap(self._device, part, shape)

    def pull(self, first: int, count: int) -> None:
        """Wait for the queued kernels, and bring `count` elements of the host's array up to date."""
        if self._is_on_top:
            self._device.finish()
        else:
            self._device.read(self._buffer, self.values[first : first + count], 4 * first)

    def push(self, first: int, count: int) -> None:
        """Bring `count` elements of the device's memory up to date."""
        if not self._is_on_top:
            self._device.write(self._buffer, self.values[first : first + count], 4 * first)


def sees_writes(device: Device) -> bool:
    """Return whether a kernel's writes to a buffer on top of a host array appear in the array without a copy."""
    if not device.shares_host_memory:
        return False
    array = aligned_empty((PAGE // 4,), np.float32)
    array[...] = 1
    buffer = device.memory.exact(on_top_of=array)
    device.launch(device.kernel("elementwise", "fill"), *device.grid(array.size), buffer, 0.0, array.size)
    device.finish()
    return not array.any()
