"""Shared memory of a host's ranks: MPI windows, the location of arrays in them, and a rendezvous."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from clcomm.base.host import usable_cores
from clcomm.comm.transport.base import Transport, mismatch
from clcomm.comm.transport.mapped_files import MappedFile, map_file_of
from clcomm.comm.transport.mpi_communicators import address_function, shared_window, world_ranks
from clcomm.comm.transport.mpi_runtime import Intracomm, Win, process_mpi
from clcomm.comm.transport.pending import StartOrder, advance_started
from clcomm.comm.transport.reduction import Fold
from clcomm.comm.transport.rendezvous import HostRendezvous, Rendezvous, length_and_dtype

T = TypeVar("T")

_PAGE = 4096
#: Bytes of /dev/shm that stay free for other processes.
_SPARE_BYTES = 1 << 20
#: The most entries of the cache of views and reductions; more than any model has buckets.
KEPT = 4096
#: Bytes of a host's memory that unreachable models (reference cycles) may hold before the garbage collector runs.
_GARBAGE_BYTES = 64 << 20


class _Windows:
    """The windows of one communicator, which is freed after the last of them.

    MPI lets windows outlive their communicator, but MPICH up to 5.0.2 identifies a window by the communicator on which
    it was made and its number there (MPIDIG_generate_win_id in src/mpid/ch4): a window that outlives it has the name of
    the first window on the next communicator, and the locks of one are counted for the other, until MPICH aborts.
    """

    def __init__(self, comm: Intracomm):
        self._comm, self._open, self._is_closed = comm, 0, False

    def make(self, own_bytes: int) -> Win:
        """Return a window that holds so many bytes of this rank from a page's start on; collective.

        A part may start anywhere in a page: Open MPI 4's do, and those of a host's only rank, which MPICH takes from
        malloc. So there is a page more, which takes no memory as nothing is written to it.
        """
        window = shared_window(self._comm, -(-own_bytes // _PAGE) * _PAGE + _PAGE if own_bytes else 0)
        self._open += 1
        return window

    def free(self, window: Win) -> None:
        """Free a window; collective."""
        window.Free()
        self._open -= 1
        self._free_comm()

    def close(self) -> None:
        """Free the communicator as soon as no window is left; collective."""
        self._is_closed = True
        self._free_comm()

    def _free_comm(self) -> None:
        if self._is_closed and not self._open:
            self._comm.Free()


@dataclass
class _Region:
    """Shared memory: a part for each rank, or one common part.

    [start, stop) are the addresses of this rank's part; `is_used` returns whether this rank has arrays in it, and
    `free`, collective, frees it.
    """

    parts: list[np.ndarray]
    common: bool
    start: int
    stop: int
    is_used: Callable[[], bool]
    free: Callable[[], object]

    def view(self, rank: int, offset: int, like: np.ndarray) -> np.ndarray:
        """Return the array at a byte offset of a rank's part, of the length and dtype of `like`."""
        return self.parts[0 if self.common else rank][offset : offset + like.nbytes].view(like.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


class HostMemory:
    """Windows of the ranks of one host, their rendezvous, and the `scratch`: zeroed bytes in common.

    Args:
        comm: an mpi4py communicator of ranks on one host, which this object takes over; `rank` and `ranks` refer to it.
        scratch_bytes: the size of `scratch`.

    Attributes:
        regions: the memory that was allocated or adopted, and is not freed.
    """

    def __init__(self, comm: Intracomm, scratch_bytes: int = 0):
        self.comm = comm
        self.rank, self.ranks = comm.Get_rank(), comm.Get_size()
        self._address = address_function(comm)
        self._members = world_ranks(comm)
        self.regions: list[_Region] = process_mpi().windows_in_use.pop(self._members, [])
        self._used_bytes = 0  # at the last garbage collection
        self._kept: dict[tuple[object, ...], Any] = {}
        nbytes = scratch_bytes + HostRendezvous.nbytes(self.ranks)
        self._windows = _Windows(comm)
        self._window = self._windows.make(nbytes if self.rank == 0 else 0)
        memory = _pages(self._window, 0, nbytes)
        if self.rank == 0:
            memory[:] = 0
        comm.Barrier()
        self._window.Lock_all()  # Sync, MPI's memory barrier, needs an access epoch
        self.fence = self._window.Sync
        self.scratch, cells = np.split(memory, [scratch_bytes])
        cores = set().union(*comm.allgather(usable_cores()))
        self.rendezvous = HostRendezvous(
            cells, self.rank, self.ranks, self.fence, self._progress, self.ranks > len(cores)
        )

    def _progress(self) -> bool:
        """Advance MPI and the operations in flight; return whether any are left."""
        self.comm.Iprobe()
        return advance_started()

    # --- room ---

    @staticmethod
    def has_room(comm: Intracomm, nbytes: int) -> bool:
        """Return whether /dev/shm, as rank 0 of a host finds it, has room for a window of `nbytes`; collective.

        Writing to a window without room ends in SIGBUS.
        """
        return bool(comm.bcast(_free_shared_memory() >= nbytes + _SPARE_BYTES, 0))

    def fits(self, nbytes: int, common: bool) -> bool:
        """Return whether `nbytes` fit, for each rank or in common; collective, the same on all ranks of the host."""
        return self.has_room(self.comm, nbytes if common else nbytes * self.ranks)

    def allocate(self, nbytes: int, common: bool) -> np.ndarray:
        """Return `nbytes` zeroed bytes: this rank's, readable by the others, or common to all; collective."""
        window = self._windows.make(nbytes if self.rank == 0 or not common else 0)
        parts = [_pages(window, rank, nbytes) for rank in ([0] if common else range(self.ranks))]
        # Of common memory each rank zeroes a part: the pages that a rank has written to count as its own.
        first, last = [at * nbytes // self.ranks for at in (self.rank, self.rank + 1)] if common else (0, nbytes)
        parts[0 if common else self.rank][first:last] = 0
        self.comm.Barrier()
        # Every view of this array refers to it, so it lives as long as the memory is used; `parts` does not count.
        mine = _pages(window, 0 if common else self.rank, nbytes)
        start, handed_out = self._address(mine), weakref.ref(mine)
        free = partial(self._windows.free, window)
        self.regions.append(_Region(parts, common, start, start + nbytes, lambda: handed_out() is not None, free))
        return mine

    def adopt(self, files: Sequence[MappedFile]) -> bool:
        """Make memory that the ranks have mapped from files a part of this memory; collective.

        Every rank gives as many files, of the same sizes. Returns False, on every rank, if one of them cannot map
        those of the others, which needs a common /proc.
        """
        everyone = self.comm.allgather([(os.getpid(), file.descriptor, file.nbytes) for file in files])
        mapped: list[list[np.ndarray]] = []
        with contextlib.suppress(OSError):
            for index, file in enumerate(files):
                theirs = [places[index] for places in everyone]
                mapped.append([
                    file.array() if rank == self.rank else map_file_of(*place) for rank, place in enumerate(theirs)
                ])  # fmt: skip
        if not all(self.comm.allgather(len(mapped) == len(files))):
            return False
        for file, parts in zip(files, mapped, strict=True):
            stop = file.address + file.nbytes
            self.regions.append(_Region(parts, False, file.address, stop, file.is_used, lambda: None))
        self._kept.clear()
        return True

    def free_unused(self) -> None:
        """Free the memory in which no rank has an array left; collective."""
        used = np.any(self.comm.allgather([region.is_used() for region in self.regions]), axis=0)
        regions, self.regions = self.regions, []
        self._kept.clear()
        for region, is_used in zip(regions, used, strict=True):
            if is_used:
                self.regions.append(region)
            else:
                region.free()

    def collect(self) -> None:
        """Collect garbage, which can take tenths of a second, then free unused windows; collective."""
        gc.collect()
        self.free_unused()
        self._used_bytes = self.held_bytes()

    def may_hold_garbage(self) -> bool:
        """Return whether the windows are far larger than at the last `collect`; the same on all ranks of the host."""
        return self.held_bytes() > 2 * self._used_bytes + _GARBAGE_BYTES

    def held_bytes(self) -> int:
        """Return the bytes of all memory that was allocated and is not freed."""
        return sum(region.nbytes for region in self.regions)

    def close(self) -> None:
        """Free the communicator and the windows; the next HostMemory of these ranks adopts windows still in use."""
        self.free_unused()
        if self._members:
            process_mpi().windows_in_use.setdefault(self._members, []).extend(self.regions)
        self.regions = []
        self._kept.clear()
        self._window.Unlock_all()
        self._windows.free(self._window)
        self._windows.close()

    # --- locations of arrays ---

    def holds(self, *arrays: np.ndarray) -> bool:
        """Return whether all of these arrays are in this memory; False for empty ones."""
        return all(self._locate(array) is not None for array in arrays)

    def holds_at(self, address: int, nbytes: int) -> bool:
        """Return whether these bytes of the process are in this memory."""
        return self._locate_bytes(address, nbytes) is not None

    def is_common(self, array: np.ndarray) -> bool:
        """Return whether the array is in memory common to all ranks."""
        located = self._locate(array)
        return located is not None and self.regions[located[0]].common

    def _locate(self, array: np.ndarray) -> tuple[int, int] | None:
        """Return the region's index and the offset in it; None for other memory and for empty arrays."""
        return self._locate_bytes(self._address(array), array.nbytes)

    def _locate_bytes(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return the region's index and the offset in it of these bytes of the process, as `_locate`."""
        if nbytes:
            for index, region in enumerate(self.regions):
                if region.start <= address and address + nbytes <= region.stop:
                    return index, address - region.start
        return None

    def distinct(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return one array for each start address."""
        return list({self._address(array): array for array in arrays}.values())

    def meet(self, *arrays: np.ndarray) -> list[list[np.ndarray]]:
        """Meet the host's ranks and return, for each array, its counterparts: one for each rank, in rank order.

        All ranks have then written what they wrote to them before this call. Raises DifferentOperations on every rank
        of the host if lengths or dtypes differ.
        """
        return self.counterparts(arrays, self.rendezvous.exchange(self.places(*arrays), length_and_dtype(arrays[0])))

    def places(self, *arrays: np.ndarray) -> list[int]:
        """Return (region, offset, nbytes, dtype) of each array, concatenated."""
        places: list[int] = []
        for array in arrays:
            region, offset = self._locate(array) or (-1, 0)  # empty arrays are in no region
            assert region >= 0 or not array.nbytes, "an array that this transport did not allocate"
            places += region, offset, array.nbytes, array.dtype.num
        return places

    def counterparts(self, arrays: Sequence[np.ndarray], everyone: np.ndarray) -> list[list[np.ndarray]]:
        """Return, for each array, its counterparts: one for each rank, in rank order.

        Args:
            arrays: this rank's.
            everyone: all ranks' `places`, one row from each.
        """
        places = everyone.reshape(self.ranks, -1, 4).tolist()
        if not all(array.nbytes for array in arrays):  # empty ones are the caller's own: not cached
            return self._make_views(arrays, places)
        key = (everyone.tobytes(), *(array.dtype for array in arrays))
        return self.kept(key, lambda: self._make_views(arrays, places))

    def kept(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return the cached result of `make` for this key; the cache is cleared when memory is allocated or freed.

        For views and reductions: every step reduces the same buckets, and a view costs 2 us.
        """
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            found = self._kept[key] = make()
        return found

    def forget(self) -> None:
        """Clear the cache."""
        self._kept.clear()

    def _make_views(self, arrays: Sequence[np.ndarray], places: list[list[list[int]]]) -> list[list[np.ndarray]]:
        for other in places[1:]:
            if [place[2:] for place in other] != [place[2:] for place in places[0]]:
                raise mismatch([place[0][2:] for place in places])
        return [
            [self.regions[region].view(rank, offset, array) for rank, (region, offset, *_) in enumerate(column)]
            if array.nbytes
            else [array] * self.ranks
            for array, column in zip(arrays, zip(*places, strict=True), strict=True)
        ]


def _pages(window: Win, rank: int, nbytes: int) -> np.ndarray:
    """Return the bytes of a rank's part from the first page on that starts in it: the same ones in all processes."""
    memory: Any = window.Shared_query(rank)[0]
    return np.frombuffer(memory, np.uint8, nbytes, -np.frombuffer(memory, np.uint8).ctypes.data % _PAGE)


def _free_shared_memory() -> int:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


# --- What the transports have in common that allocate the arrays they reduce. ---


class MemoryTransport(Transport):
    """A transport that reduces arrays in memory that it allocated itself.

    Every operation begins with a rendezvous at `rendezvous`, before data moves.
    """

    memory: HostMemory
    rendezvous: Rendezvous
    #: What the ranks of the host have started; None: the transport compares that itself.
    start_order: StartOrder | None = None
    #: Computes the sums that it supports; see `fold_with`.
    fold: Fold | None = None

    def fold_with(self, fold: Fold | None) -> None:
        """Compute the sums of later all-reduces with `fold`; None: with NumPy."""
        self.fold = fold
        self.memory.forget()

    def fits(self, nbytes: int, common: bool) -> bool:
        """Return whether `nbytes` fit in /dev/shm, for each rank or in common; collective, the same on every rank."""
        return self.memory.fits(nbytes, common)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes of this rank, readable on its host; collective, same size everywhere."""
        return self.memory.allocate(nbytes, common=False)

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes common to all ranks of a host; collective, same size everywhere."""
        return self.memory.allocate(nbytes, common=True)

    def adopt(self, files: Sequence[MappedFile]) -> bool:
        """Have the other ranks of the host read and write memory that this rank has mapped; see HostMemory.adopt."""
        return self.memory.adopt(files)

    def all_agree(self, answer: bool) -> bool:
        """Return whether all ranks answer True; collective, the same on every rank."""
        return bool(self.memory.rendezvous.exchange([answer])[:, 0].all())

    def make_room(self, nbytes: int, common: bool) -> bool:
        """Free memory that no rank of the host uses, and return whether `nbytes` then fit; collective."""
        self.memory.free_unused()
        if self.memory.may_hold_garbage():
            self.memory.collect()
        if self.fits(nbytes, common):
            return True
        self.memory.collect()
        return self.fits(nbytes, common)

    def holds(self, *arrays: np.ndarray) -> bool:
        """Return whether all of these arrays are in memory of this transport."""
        return self.memory.holds(*arrays)

    def is_common(self, array: np.ndarray) -> bool:
        """Return whether the array is in memory common to all ranks of the host."""
        return self.memory.is_common(array)
