"""Launches of kernels that compute on arrays in host memory, in place, for communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clcomm.base.errors import DeviceError
from clcomm.engine import program
from clcomm.engine.device import HOST_POINTER_ALIGNMENT, Device

if TYPE_CHECKING:
    import pyopencl as cl

#: Global and local size of one work-item.
ONE_ITEM = (1,), (1,)


class HostLaunch(NamedTuple):
    """A kernel, its arguments, and its global and local size; for an array the kernel gets a buffer on top of it."""

    kernel: program.Kernel
    arguments: Sequence[Any]
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ONE_ITEM
    #: Arrays whose addresses the kernel has.
    used: Sequence[np.ndarray] = ()


class PreparedKernels:
    """Kernels with their arguments, to be run again and again.

    Args:
        device: whose turn it is to compute.
        queue: the kernels'.
        enqueue: OpenCL's launch of a kernel.
        sized: the kernels, each with its global and local size.
        memory: what lives as long as this: kernels do not keep their arguments' memory alive.
    """

    def __init__(
        self,
        device: Device,
        queue: Any,
        enqueue: Callable[..., object],
        sized: Sequence[tuple[Any, tuple[int, ...], tuple[int, ...]]],
        memory: object,
    ):
        self._in_turn, self._queue, self._finish = device.in_turn, queue, queue.finish
        self._enqueue, self._sized, self._memory = enqueue, sized, memory
        self._first = sized[0]

    def run(self) -> None:
        """Run the kernels and wait for them."""
        with self._in_turn:
            for kernel, items, group in self._sized:
                self._enqueue(self._queue, kernel, items, group)
            self._finish()

    def run_one(self) -> None:
        """Run the only kernel and wait for it: a loop would cost each all-reduce some time."""
        kernel, items, group = self._first
        with self._in_turn:
            self._enqueue(self._queue, kernel, items, group)
            self._finish()


class HostKernels:
    """Prepares launches of kernels whose last argument is a count of elements, an int, on arrays in host memory.

    The device computes in the host's memory. The kernels have a queue of their own, so they wait for no others.
    """

    def __init__(self, device: Device):
        import pyopencl as cl

        self.device = device
        self._cl = cl
        self._queue = device.new_queue()

    def takes(self, array: np.ndarray) -> bool:
        """Return whether the device can compute on an array in place."""
        aligned = array.ctypes.data % HOST_POINTER_ALIGNMENT == 0
        fits = 0 < array.nbytes <= self.device.cl_device.max_mem_alloc_size and array.size < 2**31
        return aligned and fits and array.flags.c_contiguous and array.flags.writeable

    def prepare(self, launches: Callable[[], Sequence[HostLaunch]]) -> Callable[[], None] | None:
        """Return a function that runs the kernels and waits for them; None where the device raises an error."""
        try:
            planned = launches()
            buffers = self._buffers([each for launch in planned for each in launch.arguments])
            kernels = [self._bound(launch, buffers) for launch in planned]
        except (self._cl.Error, DeviceError, MemoryError):  # an error on one rank must not stop the others
            return None
        sized = [(kernel, *launch.sizes) for kernel, launch in zip(kernels, planned, strict=True)]
        prepared = PreparedKernels(
            self.device, self._queue, self._cl.enqueue_nd_range_kernel, sized, (planned, buffers)
        )
        return prepared.run if len(sized) > 1 else prepared.run_one

    def _bound(self, launch: HostLaunch, buffers: dict[int, cl.Buffer]) -> cl.Kernel:
        """Return the kernel with its arguments set; it runs on no elements first, since drivers compile it then."""
        *others, count = launch.arguments
        bound = [buffers[each.ctypes.data] if isinstance(each, np.ndarray) else each for each in others]
        kernel = program.bound_copy(launch.kernel, [*bound, 0])
        with self.device.in_turn:
            self._cl.enqueue_nd_range_kernel(self._queue, kernel, *launch.sizes)
            self._queue.finish()
        kernel.set_arg(len(others), np.int32(count))
        return kernel

    def _buffers(self, arguments: Sequence[object]) -> dict[int, cl.Buffer]:
        arrays = {each.ctypes.data: each for each in arguments if isinstance(each, np.ndarray)}
        return {at: self._buffer(array) for at, array in arrays.items()}

    def _buffer(self, array: np.ndarray) -> cl.Buffer:
        flags = self._cl.mem_flags
        access = flags.READ_WRITE if array.flags.writeable else flags.READ_ONLY
        return self._cl.Buffer(self.device.context, access | flags.USE_HOST_PTR, hostbuf=array)
