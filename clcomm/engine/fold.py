"""Sums over ranks on a rank's own device: one kernel reads all rows and writes the result, where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clcomm.engine import program
from clcomm.engine.device import HOST_POINTER_ALIGNMENT, Device
from clcomm.errors import DeviceError

#: The most rows that one kernel reads; further ones are added to its result by another.
MOST_ROWS = 8
#: Its one work-item walks through everything: a launch costs less than a thread of NumPy's passes.
_ALONE = (1,), (1,)
#: Which argument of the kernel is the number of elements, and how many bytes of float32 its int can count.
_COUNT, _MOST_BYTES = 2, 4 * (2**31 - 1)


class Fold:
    """Prepares sums of float32 arrays in host memory: a `clcomm.transport.reduction.Fold`.

    device: one that runs kernels in the calling thread; launches on others cost more than they save.
    """

    def __init__(self, device: Device):
        import pyopencl as cl

        self._device = device
        self._queue = cl.CommandQueue(device.context)  # its own: a sum waits for nothing else
        self._enqueue, self._error = cl.enqueue_nd_range_kernel, cl.Error
        self._most_bytes = min(device.cl_device.max_mem_alloc_size, _MOST_BYTES)

    @classmethod
    def on(cls, device: Device) -> Fold | None:
        """Return what makes sums on a device; None where NumPy makes them sooner."""
        return cls(device) if device.runs_in_caller else None

    def __call__(self, rows: Sequence[np.ndarray], out: np.ndarray, divisor: int) -> Callable[[], None] | None:
        """Return what writes ((rows[0] + rows[1]) + ...) / divisor to `out`, which may be rows[0] but no other row.

        The bits are NumPy's. None for what the device does not take: other dtypes, arrays that are not aligned, or too
        large, and whatever else it refuses.
        """
        arrays = [out, *rows]
        if len(rows) < 2 or out.nbytes > self._most_bytes or not all(_fits(array) for array in arrays):
            return None
        enqueue, queue, finish = self._enqueue, self._queue, self._queue.finish
        try:
            target, *buffers = self._buffers(arrays)
            kernels = self._kernels(target, buffers, divisor, out)
        except (self._error, DeviceError, MemoryError):  # what one rank's device refuses may not stop its sums
            return None

        def fold(_memory: Any = (arrays, target, buffers)) -> None:  # kernels do not keep their arguments' memory
            for kernel in kernels:
                enqueue(queue, kernel, *_ALONE)
            finish()

        return fold

    def _kernels(self, target: Any, rows: Sequence[Any], divisor: int, out: np.ndarray) -> list[Any]:
        """Return the kernels with their arguments set, once they have run over nothing: drivers compile them then."""
        streams = int(self._exceeds_cache(len(rows), out.nbytes))
        kernels, taken = [], 0
        for count, by in _launches(len(rows), divisor):
            group = [target, *rows[taken : taken + count - 1]] if taken else rows[:count]
            taken += count - 1 if taken else count
            kernel, factor = _kernel(self._device, count, by)
            kernels.append(program.bound_copy(kernel, [target, factor, 0, streams, *group]))
            self._enqueue(self._queue, kernels[-1], *_ALONE)
            self._queue.finish()
            kernels[-1].set_arg(_COUNT, np.int32(out.size))
        return kernels

    def _exceeds_cache(self, rows: int, nbytes: int) -> bool:
        """Say whether what so many ranks read and write in such sums, one each, is more than the cache holds."""
        return rows * (rows + 1) * nbytes > self._device.cl_device.global_mem_cache_size

    def _buffers(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Return a buffer on top of each array; one for those that are the same memory."""
        import pyopencl as cl

        context, flags = self._device.context, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
        made: dict[int, Any] = {}
        for array in arrays:
            if array.ctypes.data not in made:
                made[array.ctypes.data] = cl.Buffer(context, flags, hostbuf=array)
        return [made[array.ctypes.data] for array in arrays]


def rehearse(device: Device, rows: int, divisor: int) -> None:
    """Launch what a sum of so many rows takes, on a buffer of no meaning."""
    if device.runs_in_caller and rows > 1:
        row = device.allocate(4)
        for count, by in _launches(rows, divisor):
            kernel, factor = _kernel(device, count, by)
            device.launch(kernel, *_ALONE, row, factor, 1, 0, *[row] * count)


def _launches(rows: int, divisor: int) -> list[tuple[int, int]]:
    """Return of each launch how many rows it reads and what it divides by; after the first, row 0 is the sum so far."""
    counts, left = [min(rows, MOST_ROWS)], rows - MOST_ROWS
    while left > 0:
        counts.append(1 + min(left, MOST_ROWS - 1))
        left -= MOST_ROWS - 1
    return [*((count, 1) for count in counts[:-1]), (counts[-1], divisor)]


def _kernel(device: Device, rows: int, divisor: int) -> tuple[Any, float]:
    """Return the kernel for so many rows, and what it multiplies with, or divides by."""
    # The reciprocal of a power of two is exact: the bits are those of the division, and come sooner.
    if divisor & (divisor - 1) == 0:
        return device.kernel("fold", "fold", ROWS=rows), 1 / divisor
    return device.kernel("fold", "fold", ROWS=rows, DIVIDES=1), float(divisor)


def _fits(array: np.ndarray) -> bool:
    aligned = array.ctypes.data % HOST_POINTER_ALIGNMENT == 0
    return array.dtype == np.float32 and array.size > 0 and aligned and array.flags.writeable
