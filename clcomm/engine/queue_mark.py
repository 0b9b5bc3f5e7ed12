"""Marks in a device's queue, for which the host can wait while the device continues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clcomm.engine.launch_queue import LaunchQueue

if TYPE_CHECKING:
    import pyopencl as cl


class QueueMark:
    """A position in a queue, after everything queued so far.

    Attributes:
        leaves_cores: whether the device computes without the host's cores.
    """

    def __init__(self, device: LaunchQueue):
        import pyopencl as cl

        self.leaves_cores = not device.is_cpu
        self._device = device
        self._event: cl.Event = cl.enqueue_marker(device.queue)
        self._complete = cl.command_execution_status.COMPLETE
        device.queue.flush()

    @property
    def is_reached(self) -> bool:
        return bool(self._event.command_execution_status == self._complete)

    def wait(self) -> None:
        self._event.wait()

    def read(self, buffer: cl.Buffer, array: np.ndarray, offset: int) -> None:
        """Fill a C-contiguous host array from a buffer, from byte `offset` on, once the mark is reached; waits.

        The copy is in another queue: kernels queued after the mark continue, and must not write to that range.
        """
        self._device.transfers.read(buffer, array, offset, [self._event])
