"""Memory that all ranks of a host see: MPI windows, where arrays lie in them, and a place to meet."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clcomm.errors import MismatchError
from clcomm.transport.base import Transport
from clcomm.transport.meeting import DifferentOperations, Meeting, MeetingPoint, kind_of
from clcomm.transport.mpi import address_function, shared_window, world_ranks
from clcomm.transport.pending import advance_started
from clcomm.transport.reduction import Fold

_PAGE = 4096
#: Part of /dev/shm that is left to others.
_SPARE_BYTES = 1 << 20
#: More different places than any model has buckets.
KEPT = 4096
#: What models that refer to themselves may take of a host, when nobody uses them any more, until they are looked for.
_GARBAGE_BYTES = 64 << 20


@dataclass
class _Region:
    """One window: a part for each rank, or one common part that stands for all; [start, stop) is this rank's."""

    window: Any
    parts: list[np.ndarray]
    common: bool
    start: int
    stop: int
    handed_out: weakref.ref[np.ndarray]

    def view(self, rank: int, offset: int, like: np.ndarray) -> np.ndarray:
        """Return the array at this offset of a rank's part, of the length and dtype of `like`."""
        return self.parts[0 if self.common else rank][offset : offset + like.nbytes].view(like.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


#: Windows that outlived their Communicator, since arrays lay in them, by the world's ranks that share them.
_left: dict[tuple[int, ...], list[_Region]] = {}


class HostMemory:
    """Windows of the ranks of one host, a point where they meet, and `desk_bytes` zeroed bytes they have in common.

    Takes over `comm`, whose ranks are all on one host: `rank` and `ranks` count those.
    """

    def __init__(self, comm: Any, desk_bytes: int = 0):
        self.comm = comm
        self.rank, self.ranks = comm.Get_rank(), comm.Get_size()
        self._address = address_function()
        self._members = world_ranks(comm)
        self._regions: list[_Region] = _left.pop(self._members, [])
        self._used_bytes = 0  # when garbage was looked for
        self._kept: dict[tuple, Any] = {}
        nbytes = desk_bytes + MeetingPoint.nbytes(self.ranks)
        self._window = self._make_window(nbytes if self.rank == 0 else 0)
        memory = _memory(self._window, 0, nbytes)
        if self.rank == 0:
            memory[:] = 0
        comm.Barrier()
        self._window.Lock_all()  # Sync, MPI's memory barrier, wants an access epoch
        self.fence = self._window.Sync
        self.desk, cells = np.split(memory, [desk_bytes])
        cores = set().union(*comm.allgather(_cores()))
        self.point = MeetingPoint(cells, self.rank, self.ranks, self.fence, self._progress, self.ranks > len(cores))

    def _progress(self) -> bool:
        """Let MPI move on, and what is in flight; say whether something is."""
        self.comm.Iprobe()
        return advance_started()

    # --- room ---

    @staticmethod
    def has_room(comm: Any, nbytes: int) -> bool:
        """Say what rank 0 of a host sees: a window larger than what /dev/shm has left ends in SIGBUS; collective."""
        return comm.bcast(_free_shared_memory() >= nbytes + _SPARE_BYTES, 0)

    def fits(self, nbytes: int, common: bool) -> bool:
        """Say, alike on every rank of the host, whether it has room for so many bytes, a rank or in common."""
        return self.has_room(self.comm, nbytes if common else nbytes * self.ranks)

    def allocate(self, nbytes: int, common: bool) -> np.ndarray:
        """Return `nbytes` zeroed bytes: this rank's, which the others can read, or one memory for all; collective."""
        window = self._make_window(nbytes if self.rank == 0 or not common else 0)
        parts = [_memory(window, rank, nbytes) for rank in ([0] if common else range(self.ranks))]
        if not common or self.rank == 0:
            parts[0 if common else self.rank][:] = 0
        self.comm.Barrier()
        # Every view of this array refers to it, so it lives as long as anyone uses the memory; `parts` does not count.
        mine = _memory(window, 0 if common else self.rank, nbytes)
        start = self._address(mine)
        self._regions.append(_Region(window, parts, common, start, start + nbytes, weakref.ref(mine)))
        return mine

    def _make_window(self, own_bytes: int) -> Any:
        return shared_window(self.comm, -(-own_bytes // _PAGE) * _PAGE)

    def free_unused(self) -> None:
        """Free the windows in which no rank has an array any more; collective."""
        used = np.any(self.comm.allgather([region.handed_out() is not None for region in self._regions]), axis=0)
        regions, self._regions = self._regions, []
        self._kept.clear()
        for region, is_used in zip(regions, used, strict=True):
            if is_used:
                self._regions.append(region)
            else:
                region.window.Free()

    def collect(self) -> None:
        """Free the windows that only garbage uses too, which Python may take tenths of a second to find; collective."""
        gc.collect()
        self.free_unused()
        self._used_bytes = self._held_bytes()

    def may_hold_garbage(self) -> bool:
        """Say, alike on every rank of the host, whether it holds far more than when `collect` was called."""
        return self._held_bytes() > 2 * self._used_bytes + _GARBAGE_BYTES

    def _held_bytes(self) -> int:
        return sum(region.nbytes for region in self._regions)

    def close(self) -> None:
        """Free communicator and windows; one whose memory some rank still uses is left to these ranks' next memory."""
        self.free_unused()
        if self._members:
            _left.setdefault(self._members, []).extend(self._regions)
        self._regions = []
        self._kept.clear()
        self._window.Unlock_all()
        self._window.Free()
        self.comm.Free()

    # --- what lies where ---

    def holds(self, *arrays: np.ndarray) -> bool:
        """Say whether all of these arrays lie in this memory; empty ones lie nowhere."""
        return all(self._locate(array) is not None for array in arrays)

    def is_common(self, array: np.ndarray) -> bool:
        """Say whether the array lies in memory that all ranks share as one."""
        located = self._locate(array)
        return located is not None and self._regions[located[0]].common

    def _locate(self, array: np.ndarray) -> tuple[int, int] | None:
        """Return the region's index and the offset in it; None for memory from elsewhere, and for empty arrays."""
        nbytes = array.nbytes
        if nbytes:
            address = self._address(array)
            for index, region in enumerate(self._regions):
                if region.start <= address and address + nbytes <= region.stop:
                    return index, address - region.start
        return None

    def distinct(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return one array for each place where some of these start."""
        return list({self._address(array): array for array in arrays}.values())

    def meet(self, *arrays: np.ndarray) -> list[list[np.ndarray]]:
        """Return, for each array, the ranks' arrays; by then every rank has written what it had to write.

        Raises DifferentOperations on every rank of the host where lengths or dtypes differ.
        """
        return self.counterparts(arrays, self.point.exchange(self.places(*arrays), kind_of(arrays[0])))

    def places(self, *arrays: np.ndarray) -> list[int]:
        """Return (region, offset, nbytes, dtype) of each array, one after the other."""
        places: list[int] = []
        for array in arrays:
            region, offset = self._locate(array) or (-1, 0)
            assert region >= 0 or not array.nbytes, "an array that this transport did not allocate"
            places += region, offset, array.nbytes, array.dtype.num
        return places

    def counterparts(self, arrays: Sequence[np.ndarray], everyone: np.ndarray) -> list[list[np.ndarray]]:
        """Return, for each array, the ranks' arrays, from all ranks' `places`."""
        places = everyone.reshape(self.ranks, -1, 4).tolist()
        if not all(array.nbytes for array in arrays):  # empty ones are the caller's own, not to be kept
            return self._make_views(arrays, places)
        key = (everyone.tobytes(), *(array.dtype for array in arrays))
        return self.kept(key, lambda: self._make_views(arrays, places))

    def kept(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, or made under this key before, until memory is allocated or freed.

        For views, and what is built on them: buckets come back every step, and views cost 2 us each.
        """
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            found = self._kept[key] = make()
        return found

    def forget(self) -> None:
        """Forget what is kept: it is made anew."""
        self._kept.clear()

    def _make_views(self, arrays: Sequence[np.ndarray], places: list) -> list[list[np.ndarray]]:
        for other in places[1:]:
            if [place[2:] for place in other] != [place[2:] for place in places[0]]:
                raise mismatch([place[0][2:] for place in places])
        return [
            [self._regions[region].view(rank, offset, array) for rank, (region, offset, *_) in enumerate(column)]
            if array.nbytes
            else [array] * self.ranks
            for array, column in zip(arrays, zip(*places, strict=True), strict=True)
        ]


class MemoryTransport(Transport):
    """A transport that reduces arrays in memory which it allocated itself.

    Every operation begins with a meeting at `meeting`, before data moves.
    """

    memory: HostMemory
    meeting: Meeting
    #: Makes the sums in it, where it can; see `fold_with`.
    fold: Fold | None = None

    def fold_with(self, fold: Fold | None) -> None:
        """Let `fold` make the sums of all-reduces that are called or prepared from now on; None: NumPy does."""
        self.fold = fold
        self.memory.forget()

    def fits(self, nbytes: int, common: bool) -> bool:
        """Say, alike on every rank, whether /dev/shm has room for `nbytes` a rank, or in common; collective."""
        return self.memory.fits(nbytes, common)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes of this rank, which its host can read; collective, same size everywhere."""
        return self.memory.allocate(nbytes, common=False)

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes, one memory on all ranks of a host; collective, same size everywhere."""
        return self.memory.allocate(nbytes, common=True)

    def make_room(self, nbytes: int, common: bool) -> bool:
        """Free what no rank of the host uses any more, and say whether so much `fits` then; collective."""
        self.memory.free_unused()
        if self.memory.may_hold_garbage():
            self.memory.collect()
        if self.fits(nbytes, common):
            return True
        self.memory.collect()
        return self.fits(nbytes, common)

    def holds(self, *arrays: np.ndarray) -> bool:
        """Say whether all of these arrays lie in memory that this transport allocated."""
        return self.memory.holds(*arrays)

    def is_common(self, array: np.ndarray) -> bool:
        """Say whether the array lies in memory that all ranks of the host share as one."""
        return self.memory.is_common(array)


def places_elsewhere(*arrays: np.ndarray) -> list[int]:
    """Return what `places` returns, for arrays of which none is in memory that ranks share."""
    return [number for array in arrays for number in (-1, 0, array.nbytes, array.dtype.num)]


def require_alike(everyone: np.ndarray, arrays: int) -> None:
    """Raise what all ranks raise where their tags, or the `places` behind them, tell of different operations.

    everyone: (ranks, 1 + 4 * arrays), one row from each rank.
    """
    kinds = everyone[:, 1:].reshape(len(everyone), arrays, 4)[:, :, 2:]
    if (kinds != kinds[0]).any():
        raise mismatch(kinds[:, 0].tolist())
    if (everyone[:, 0] != everyone[0, 0]).any():
        raise DifferentOperations


def mismatch(kinds: list[list[int]]) -> MismatchError:
    """Return the error for arrays that differ, from (nbytes, dtype) on each rank."""
    dtypes: dict[int, np.dtype] = {np.dtype(code).num: np.dtype(code) for code in np.typecodes["All"]}
    sides: dict[str, list[str]] = {}
    for rank, (nbytes, number) in enumerate(kinds):
        dtype = dtypes[number]
        # The number of texts, records and bfloat16 does not tell how long an element is.
        text = f"{nbytes // dtype.itemsize:,} {dtype}" if dtype.itemsize else f"{nbytes:,} bytes of dtype {dtype.name}"
        sides.setdefault(text, []).append(str(rank))
    listed = ", ".join(f"{text} on rank {' and '.join(ranks)}" for text, ranks in sides.items())
    return MismatchError(f"array: expected the same length and dtype on every rank, got {listed}")


def _memory(window: Any, rank: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(window.Shared_query(rank)[0], np.uint8, nbytes)


def _free_shared_memory() -> int:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _cores() -> set[int]:
    """Return the cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return affinity(0) if affinity else set(range(os.cpu_count() or 1))
