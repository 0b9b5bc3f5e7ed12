"""Kernels on host memory, where it lies: what the communication side lets a rank's own device compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clcomm.engine import program
from clcomm.engine.device import HOST_POINTER_ALIGNMENT, Device
from clcomm.errors import DeviceError

#: One work-item.
ALONE = (1,), (1,)


class Launch(NamedTuple):
    """A kernel, its arguments (arrays stand for buffers on top of them), and its global and local size."""

    kernel: Any
    arguments: Sequence[Any]
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ALONE


class HostKernels:
    """Prepares launches of kernels whose last argument is a count of elements, an int, on arrays in host memory.

    device: one that computes in the host's memory. Its queue is not used: what is launched here waits for nothing else.
    """

    def __init__(self, device: Device):
        import pyopencl as cl

        self.device = device
        self._cl = cl
        self._queue = cl.CommandQueue(device.context)

    def takes(self, array: np.ndarray) -> bool:
        """Say whether a device can compute on an array where it lies."""
        aligned = array.ctypes.data % HOST_POINTER_ALIGNMENT == 0
        fits = 0 < array.nbytes <= self.device.cl_device.max_mem_alloc_size and array.size < 2**31
        return aligned and fits and array.flags.c_contiguous and array.flags.writeable

    def prepare(self, launches: Callable[[], Sequence[Launch]]) -> Callable[[], None] | None:
        """Return what launches the kernels and waits for them; None where the device refuses one of them."""
        try:
            planned = launches()
            buffers = self._buffers([each for launch in planned for each in launch.arguments])
            kernels = [self._bound(launch, buffers) for launch in planned]
        except (self._cl.Error, DeviceError, MemoryError):  # what one rank's device refuses may not stop the others
            return None
        enqueue, queue, finish = self._cl.enqueue_nd_range_kernel, self._queue, self._queue.finish
        in_turn = self.device.in_turn
        sized = [(kernel, *launch.sizes) for kernel, launch in zip(kernels, planned, strict=True)]

        def run(_memory: Any = (planned, buffers)) -> None:  # kernels do not keep their arguments' memory
            with in_turn:
                for kernel, items, group in sized:
                    enqueue(queue, kernel, items, group)
                finish()

        return run

    def _bound(self, launch: Launch, buffers: dict[int, Any]) -> Any:
        """Return the kernel with its arguments set, once it has run over nothing: drivers compile it then."""
        *others, count = launch.arguments
        bound = [buffers[each.ctypes.data] if isinstance(each, np.ndarray) else each for each in others]
        kernel = program.bound_copy(launch.kernel, [*bound, 0])
        with self.device.in_turn:
            self._cl.enqueue_nd_range_kernel(self._queue, kernel, *launch.sizes)
            self._queue.finish()
        kernel.set_arg(len(others), np.int32(count))
        return kernel

    def _buffers(self, arguments: Sequence[Any]) -> dict[int, Any]:
        """Return a buffer on top of each array, by where it lies."""
        flags = self._cl.mem_flags.READ_WRITE | self._cl.mem_flags.USE_HOST_PTR
        arrays = {each.ctypes.data: each for each in arguments if isinstance(each, np.ndarray)}
        return {at: self._cl.Buffer(self.device.context, flags, hostbuf=array) for at, array in arrays.items()}
