"""Sums over ranks on a rank's own device: one kernel reads all rows in place and writes the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from clcomm.base.errors import ClcommError
from clcomm.base.host.arrays import BFLOAT16, aligned_empty
from clcomm.engine import host_kernels, selection
from clcomm.engine.device import Device
from clcomm.engine.host_kernels import ONE_ITEM, HostKernels, HostLaunch
from clcomm.engine.program import Kernel

#: Words of a call that DeviceFold sets, as kernels/fold.cl has them: the part's ends, whether stores stream, addresses
#: of cells and result, the bits of the factor, and the addresses of the rows. transport/fused.py has those before.
FIRST, LAST, STREAMS, CELLS, OUT, FACTOR, ROW_0 = range(10, 17)
#: The number of elements, behind the words that transport/work_queue.py sets.
COUNT = 29
#: The kernels of whole all-reduces on devices that compute in the calling thread: parts of one's own, and shared ones.
WITH_RENDEZVOUS = "meet_and_fold_at", "meet_and_share_at"
#: The kernel that returns the addresses of the same as functions, and its file.
ADDRESSES = "addresses", "fold_called"
#: The types in OpenCL C in which whole all-reduces sum.
_TYPES = {"f4": "float", "f8": "double", "i4": "uint", "u4": "uint", "i8": "ulong", "u8": "ulong"}
ELEMENTS = {np.dtype(name): kind for name, kind in _TYPES.items()}
#: The most rows that one kernel reads; further ones are added to its result by another.
MOST_ROWS = 8


class DeviceFold:
    """Prepares sums of float32, float16 or bfloat16 in host memory: a `clcomm.comm.transport.reduction.Fold`.

    One work-item does each sum: the device runs kernels in the calling thread.
    """

    def __init__(self, device: Device):
        self._device, self._kernels = device, HostKernels(device)
        self._found: dict[tuple[int, int, str], list[int]] = {}  # the functions of all-reduces

    @classmethod
    def on(cls, device: Device) -> DeviceFold | None:
        """Return a DeviceFold; None where NumPy is faster, on devices with worker threads or memory of their own."""
        return cls(device) if device.runs_in_caller else None

    def __call__(self, rows: Sequence[np.ndarray], out: np.ndarray, divisor: int) -> Callable[[], None] | None:
        """Return a function that writes ((rows[0] + rows[1]) + ...) / divisor to `out`, with the same bits as NumPy.

        `out` may be rows[0], but no other row. Returns None for other dtypes, for a mean of 16-bit numbers, for arrays
        that are not aligned or too large, and where the device raises an error.
        """
        arrays = [out, *rows]
        if len(rows) < 2 or not all(map(self._kernels.takes, arrays)):
            return None
        if all(array.dtype == np.float32 for array in arrays):
            return self._kernels.prepare(lambda: self._launches(rows, out, divisor))
        for dtype, name in ((np.dtype(np.float16), "halves"), (BFLOAT16, "bfloat16")):
            if all(array.dtype == dtype for array in arrays) and divisor == 1:
                return self._kernels.prepare(partial(self._launches_of_16_bit, name, rows, out))
        return None

    def with_rendezvous(
        self, rows: Sequence[np.ndarray], out: np.ndarray, divisor: int, part: slice, cells: np.ndarray,
        call: np.ndarray, shares: bool = False,
    ) -> Callable[[], object] | None:  # fmt: skip
        """Return a function that meets the other ranks, folds a part of the rows as `__call__` does, and meets again.

        For the dtypes of ELEMENTS, and up to MOST_ROWS ranks; arguments: `clcomm.comm.transport.fused.RendezvousFold`.
        """
        arrays, element = [out, *rows], ELEMENTS.get(out.dtype)
        fits = element and 2 <= len(rows) <= MOST_ROWS and all(array.dtype == out.dtype for array in arrays)
        if not (element and fits and all(map(self._kernels.takes, (*arrays, cells, call)))):
            return None
        if (shares or element != "float") and not self._device.runs_in_caller:
            return None
        call[FIRST], call[LAST] = part.start, part.stop
        call[STREAMS] = self._exceeds_cache(len(rows), out.nbytes // len(rows))
        if not self._device.runs_in_caller:
            return self._kernels.prepare(lambda: self._launch_of_rendezvous(rows, out, divisor, cells, call))
        call[CELLS], call[OUT], call[COUNT] = cells.ctypes.data, out.ctypes.data, out.size
        call[FACTOR : FACTOR + 1].view(out.dtype)[0] = _factor(divisor)
        call[ROW_0 : ROW_0 + len(rows)] = [row.ctypes.data for row in rows]
        used = [call, cells, *arrays]
        found = self._addresses(len(rows), divisor, element)
        direct = None if found is None else host_kernels.function(found[shares], call, used)
        if direct is not None:
            return direct
        of = self._device, len(rows), divisor, WITH_RENDEZVOUS[shares]
        return self._kernels.prepare(lambda: [
            HostLaunch(_kernel(*of, element=element)[0], [call.ctypes.data, out.size], used=used)
        ])  # fmt: skip

    def _launch_of_rendezvous(
        self, rows: Sequence[np.ndarray], out: np.ndarray, divisor: int, cells: np.ndarray, call: np.ndarray
    ) -> list[HostLaunch]:
        kernel, factor = _kernel(self._device, len(rows), divisor, "meet_and_fold")
        return [HostLaunch(kernel, [call, cells, out, factor, *rows, out.size])]

    def _addresses(self, rows: int, divisor: int, element: str) -> list[int] | None:
        """Return the addresses of the functions that fold and share; None where they cannot be called."""
        key = rows, divisor, element
        if not _calls(self._device) or key in self._found:
            return self._found.get(key)
        found = aligned_empty((2,), np.int64)
        look_up = self._kernels.prepare(
            lambda: [HostLaunch(_kernel(self._device, rows, divisor, *ADDRESSES, element=element)[0], [found, 2])]
        )
        if look_up is None:
            return None
        look_up()
        self._found[key] = found.tolist()
        return self._found[key]

    def _launches(self, rows: Sequence[np.ndarray], out: np.ndarray, divisor: int) -> list[HostLaunch]:
        streams = int(self._exceeds_cache(len(rows), out.nbytes))
        launches, taken = [], 0
        for count, by in _cuts(len(rows), divisor):
            group = [out, *rows[taken : taken + count - 1]] if taken else rows[:count]
            taken += count - 1 if taken else count
            kernel, factor = _kernel(self._device, count, by)
            launches.append(HostLaunch(kernel, [out, factor, streams, *group, out.size]))
        return launches

    def _launches_of_16_bit(self, name: str, rows: Sequence[np.ndarray], out: np.ndarray) -> list[HostLaunch]:
        """Return the launches of a sum of 16-bit numbers; the running total is float32."""
        decode, add, encode = (self._device.kernel("codec", f"{step}_{name}") for step in ("from", "add", "to"))
        total, count = aligned_empty(out.shape, np.float32), out.size
        return [
            HostLaunch(decode, [rows[0], total, count]), *(HostLaunch(add, [row, total, count]) for row in rows[1:]),
            HostLaunch(encode, [total, out, 1.0, count]),
        ]  # fmt: skip

    def _exceeds_cache(self, rows: int, nbytes: int) -> bool:
        """Return whether the sums of all ranks, each with its rows and result, exceed the device's cache."""
        return rows * (rows + 1) * nbytes > self._device.cl_device.global_mem_cache_size


#: The class's former name, for programs that import it.
Fold = DeviceFold


@cache
def fold_of_rank(local_rank: int, local_size: int, cores: int) -> DeviceFold | None:
    """Return the DeviceFold of this process's CPU, which is selected as for training; None where NumPy sums.

    That is so where no such device is installed, where CLCOMM_DEVICE names another, and for ranks of several cores,
    whose device has worker threads.
    """
    if cores > 1:
        return None
    spec = None if selection.is_named() else "cpu"
    try:
        return DeviceFold.on(Device.select(spec, local_rank=local_rank, local_size=local_size, cores=cores))
    except (ClcommError, ImportError):
        return None


def rehearse(device: Device, rows: int, divisor: int) -> None:
    """Launch the kernels of a sum of this many rows, on an uninitialised buffer, and of all-reduces, on nothing."""
    if device.runs_in_caller and rows > 1:
        row = device.allocate(4)
        for count, by in _cuts(rows, divisor):
            kernel, factor = _kernel(device, count, by)
            device.launch(kernel, *ONE_ITEM, row, factor, 0, *[row] * count, 1)
        if rows > MOST_ROWS:
            return
        if _calls(device):
            device.launch(_kernel(device, rows, divisor, *ADDRESSES)[0], *ONE_ITEM, row, 0)
            return
        for name in WITH_RENDEZVOUS:
            device.launch(_kernel(device, rows, divisor, name)[0], *ONE_ITEM, 0, 0)


def _cuts(rows: int, divisor: int) -> list[tuple[int, int]]:
    """Return each launch's number of rows and divisor; after the first launch, row 0 holds the running sum."""
    counts, left = [min(rows, MOST_ROWS)], rows - MOST_ROWS
    while left > 0:
        counts.append(1 + min(left, MOST_ROWS - 1))
        left -= MOST_ROWS - 1
    return [*((count, 1) for count in counts[:-1]), (counts[-1], divisor)]


def _calls(device: Device) -> bool:
    return device.takes_addresses and device.runs_in_caller and host_kernels.is_supported()


def _factor(divisor: int) -> float:
    """Return the divisor; for a power of two its reciprocal, which is exact, and faster to multiply by."""
    return float(divisor) if divisor & (divisor - 1) else 1 / divisor


def _kernel(
    device: Device, rows: int, divisor: int, name: str = "fold", file: str = "fold", element: str = "float"
) -> tuple[Kernel, float]:
    """Return a kernel for this number of rows, and its factor or divisor."""
    options: dict[str, Any] = {"ROWS": rows} | ({"IN_CALLER": 1} if device.runs_in_caller else {})
    options |= {"DATA": host_kernels.DATA} if file == "fold_called" else {}
    options |= {"DIVIDES": 1} if divisor & (divisor - 1) else {}
    options |= {"ELEMENT": element} if element != "float" else {}
    return device.kernel(file, name, **options), _factor(divisor)
