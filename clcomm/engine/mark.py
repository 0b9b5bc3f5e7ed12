"""Places in a device's queue that the host can wait for while the device goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from clcomm.engine.device import Device


class QueueMark:
    """A place behind everything that a device has queued so far.

    leaves_cores: whether the device computes without the host's cores.
    """

    def __init__(self, device: Device):
        import pyopencl as cl

        self.leaves_cores = not device.is_cpu
        self._device = device
        self._event: Any = cl.enqueue_marker(device.queue)
        self._complete = cl.command_execution_status.COMPLETE
        device.queue.flush()

    @property
    def is_reached(self) -> bool:
        """Whether the device has done everything before it."""
        return self._event.command_execution_status == self._complete

    def wait(self) -> None:
        """Return when it has."""
        self._event.wait()

    def read(self, buffer: Any, array: np.ndarray, offset: int) -> None:
        """Fill a C-contiguous host array from a buffer, `offset` bytes in, as soon as the mark is reached; waits.

        Past the queue: what is queued behind the mark goes on meanwhile, and must not write there.
        """
        import pyopencl as cl

        queue = self._device.side_queue
        cl.enqueue_copy(queue, array, buffer, src_offset=offset, is_blocking=True, wait_for=[self._event])
