"""Device memory in which a kernel's mistakes show: every buffer holds NaN at first and lies between guards of NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from clcomm.base.host.arrays import PAGE, aligned_empty
from clcomm.engine.device import Device
from clcomm.engine.memory import Memory

#: In each byte: as float32 it is NaN, as int32 -1.
POISON = 0xFF


class ExactMemory(Memory):
    """Buffers of exact sizes, never used twice, so that any access outside them is an error."""

    def __init__(self, device: Device):
        super().__init__(device.context, device.queue, device.name)
        self._device = device

    def allocate(self, nbytes: int) -> Any:
        """Return a buffer of `nbytes`."""
        import pyopencl as cl

        return cl.Buffer(self._device.context, cl.mem_flags.READ_WRITE, nbytes)

    def exact(self, nbytes: int = 0, *, copy_of: np.ndarray | None = None, on_top_of: np.ndarray | None = None) -> Any:
        """Return a buffer of `nbytes`, or with the values of an array."""
        import pyopencl as cl

        array = copy_of if copy_of is not None else on_top_of
        buffer = self.allocate(nbytes if array is None else array.nbytes)
        if array is not None:
            cl.enqueue_copy(self._device.queue, buffer, np.ascontiguousarray(array), is_blocking=True)
        return buffer


class GuardedMemory(ExactMemory):
    """Poisoned buffers between poisoned guards, for devices that compute in the host's memory."""

    def __init__(self, device: Device):
        super().__init__(device)
        self._given: list[np.ndarray] = []

    def allocate(self, nbytes: int) -> Any:
        """Return a buffer of `nbytes` of NaN between guards of a page."""
        import pyopencl as cl

        whole = aligned_empty((nbytes + 2 * PAGE,), np.uint8)
        whole[...] = POISON
        self._given.append(whole)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        return cl.Buffer(self._device.context, flags, hostbuf=whole[PAGE:-PAGE])

    def check(self) -> None:
        """Assert that no guard was written to, and forget the buffers given out so far."""
        self._device.queue.finish()
        given, self._given = self._given, []
        for whole in given:
            is_whole = (whole[:PAGE] == POISON).all() and (whole[-PAGE:] == POISON).all()
            assert is_whole, f"a kernel wrote outside a buffer of {whole.size - 2 * PAGE} bytes"


def guarded(device: Device) -> Device:
    """Return the device with guarded memory."""
    device.memory = GuardedMemory(device)
    return device
