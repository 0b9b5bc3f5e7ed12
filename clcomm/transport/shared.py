"""The `shared` transport: reductions in an MPI shared-memory window, read in place.

Every rank's part of the window can be read by all ranks of the host. Each rank folds its own shard of a range over
all parts, in rank order, and writes it where everyone reads it: with a `common` array as target every byte is read
once and written once. Two meetings frame the work: in the first each rank tells where its arrays lie, and all data is
written; at the second all shards are folded. Small arrays go through slots instead: each rank copies its own in, and
after a single meeting folds everyone's by itself.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clcomm.errors import MismatchError
from clcomm.layout import shard_bounds
from clcomm.transport.base import Pending, Transport
from clcomm.transport.meeting import MeetingPoint
from clcomm.transport.mpi import SHARD_MULTIPLE
from clcomm.transport.reduction import prepared_reduction, reduce_in_rank_order

_PAGE = 4096
#: Part of /dev/shm that is left to others.
_SPARE_BYTES = 1 << 20
#: Arrays up to this size take the way through the slots.
SLOT_BYTES = 16 << 10
#: More different places than any model has buckets.
_KEPT_VIEWS = 4096


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


class SharedTransport(Transport):
    """Collectives on arrays that `allocate` or `allocate_common` returned, or slices of them.

    All ranks of `comm`, which this transport takes over, are on one host. Slices may lie at other offsets on other
    ranks. MismatchError is raised on every rank where lengths or dtypes differ.
    """

    name = "shared"

    def __init__(self, comm: Any, pending: deque[Pending] | None = None):
        from mpi4py import MPI

        self.comm = comm
        self._address = MPI.Get_address  # eight times faster than asking NumPy
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        self._second_comm = comm.Dup()
        self._pending = deque() if pending is None else pending
        self._regions: list[_Region] = []
        # The ranks' arrays of earlier calls, by their places: buckets come back every step, and views cost 2 us each.
        self._views: dict[tuple, list[list[np.ndarray]]] = {}
        self._prepared = 0  # all-reduces prepared so far: their numbers tag the meetings
        self._open_meeting_point()

    def _open_meeting_point(self) -> None:
        """Lay out the window of our own: two slots for each rank, then the meeting point."""
        nbytes = _own_bytes(self.world_size)
        self._window = self._make_window(nbytes if self.rank == 0 else 0)
        memory = _memory(self._window, 0, nbytes)
        if self.rank == 0:
            memory[:] = 0
        self.comm.Barrier()
        self._window.Lock_all()  # Sync, MPI's memory barrier, wants an access epoch
        slots, cells = np.split(memory, [2 * self.world_size * SLOT_BYTES])
        self._point = MeetingPoint(cells, self.rank, self.world_size, self._window.Sync, self.comm.Iprobe)
        self._slots = slots.reshape(2, self.world_size, SLOT_BYTES)
        self._slot_views: dict[tuple, list[np.ndarray]] = {}

    # --- memory ---

    @staticmethod
    def can_open(comm: Any) -> bool:
        """Say, alike on every rank, whether /dev/shm has room for what the transport itself needs; collective."""
        return _has_room(comm, _own_bytes(comm.Get_size()))

    def fits(self, nbytes: int) -> bool:
        """Say, alike on every rank, whether /dev/shm has room for `nbytes` in all; collective."""
        return _has_room(self.comm, nbytes)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes of this rank, which the others can read; collective, same size everywhere."""
        return self._allocate(nbytes, nbytes, common=False)

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes that are one memory on all ranks; collective, same size everywhere."""
        return self._allocate(nbytes, nbytes if self.rank == 0 else 0, common=True)

    def _allocate(self, nbytes: int, own_bytes: int, common: bool) -> np.ndarray:
        window = self._make_window(own_bytes)
        parts = [_memory(window, rank, nbytes) for rank in ([0] if common else range(self.world_size))]
        if not common or self.rank == 0:
            parts[0 if common else self.rank][:] = 0
        self.comm.Barrier()
        # Every view of this array refers to it, so it lives as long as anyone uses the memory; `parts` does not count.
        mine = _memory(window, 0 if common else self.rank, nbytes)
        start = self._address(mine)
        self._regions.append(_Region(window, parts, common, start, start + nbytes, weakref.ref(mine)))
        return mine

    def _make_window(self, own_bytes: int) -> Any:
        from mpi4py import MPI

        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        window = MPI.Win.Allocate_shared(-(-own_bytes // _PAGE) * _PAGE, 1, info, self.comm)
        info.Free()
        return window

    def free_unused(self) -> None:
        """Free the windows in which no rank has an array any more; collective."""
        used = np.any(self.comm.allgather([region.handed_out() is not None for region in self._regions]), axis=0)
        regions, self._regions = self._regions, []
        self._views.clear()
        for region, is_used in zip(regions, used, strict=True):
            if is_used:
                self._regions.append(region)
            else:
                region.window.Free()

    def holds(self, *arrays: np.ndarray) -> bool:
        """Say whether all of these arrays lie in memory that this transport allocated."""
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

    # --- collectives ---

    def barrier(self) -> None:
        self._point.barrier()

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        if 0 < source.nbytes <= SLOT_BYTES:
            self._reduce_slots(source, out, op)
            return
        sources, targets = self._meet(source, out)
        self._own_shard_reduction(sources, targets, op)()
        self._point.barrier()

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        self._prepared = tag = self._prepared + 1
        sources, targets = self._meet(source, out)
        if 0 < source.nbytes <= SLOT_BYTES:
            reduction = self._slot_reduction(source, out, op, tag)
        else:
            reduction = self._shard_reduction(sources, targets, op, tag)
        self._point.barrier()
        return reduction

    def _shard_reduction(
        self, sources: list[np.ndarray], targets: list[np.ndarray], op: str, tag: int
    ) -> Callable[[], None]:
        meet, reduce = self._point.barrier, self._own_shard_reduction(sources, targets, op)

        def run() -> None:
            meet(tag)
            reduce()
            meet(tag)

        return run

    def _slot_reduction(self, source: np.ndarray, out: np.ndarray, op: str, tag: int) -> Callable[[], None]:
        point, result = self._point, np.empty_like(source)
        slots = [self._slot_rows(parity, source) for parity in (0, 1)]
        reductions = [prepared_reduction(rows, result, op) for rows in slots]

        def run() -> None:
            parity = point.parity
            np.copyto(slots[parity][self.rank], source)
            point.barrier(tag)
            reductions[parity]()
            np.copyto(out, result)  # only finished values: a neighbour may be reading the same memory

        return run

    def _reduce_slots(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce a small array with one meeting; each rank folds all of it.

        The slots of the next call are others, so a rank that is late may still read these. Only finished values go to
        `out`, where a neighbour may already be reading the same ones.
        """
        rows = self._slot_rows(self._point.parity, source)
        np.copyto(rows[self.rank], source)
        kinds = self._point.exchange((source.nbytes, source.dtype.num))
        if (kinds != kinds[0]).any():
            raise _mismatch(kinds[:, 0].tolist())
        result = np.empty_like(source)
        reduce_in_rank_order(rows, result, op)
        np.copyto(out, result)

    def _slot_rows(self, parity: int, like: np.ndarray) -> list[np.ndarray]:
        key = (parity, like.nbytes, like.dtype)
        rows = self._slot_views.get(key)
        if rows is None:
            if len(self._slot_views) >= _KEPT_VIEWS:
                self._slot_views.clear()
            rows = self._slot_views[key] = [slot[: like.nbytes].view(like.dtype) for slot in self._slots[parity]]
        return rows

    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        own = np.array(self._places(source, out), np.int64)
        everyone = np.empty((self.world_size, own.size), np.int64)

        def fold() -> Any:
            sources, targets = self._counterparts((source, out), everyone)
            self._own_shard_reduction(sources, targets, op)()
            return self._second_comm.Ibarrier()

        return Pending(self._pending, self.comm.Iallgather(own, everyone), fold)

    def _own_shard_reduction(self, sources: list[np.ndarray], targets: list[np.ndarray], op: str) -> Callable[[], None]:
        bounds = shard_bounds(sources[0].size, self.world_size, SHARD_MULTIPLE)
        shard = slice(bounds[self.rank], bounds[self.rank + 1])
        first, *others = [target[shard] for target in {self._address(target): target for target in targets}.values()]
        # Folding straight into the first target is right unless that memory is also a later row of the sum: rank 0's
        # part is row 0 when the caller reduces in place, and no row at all when `out` is another region.
        reduce = prepared_reduction([source[shard] for source in sources], first, op)

        def reduce_and_copy() -> None:
            reduce()
            for target in others:
                np.copyto(target, first)

        return reduce_and_copy

    def broadcast(self, array: np.ndarray, root: int) -> None:
        (parts,) = self._meet(array)
        if self._address(parts[root]) != self._address(array):
            np.copyto(array, parts[root])
        self._point.barrier()

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        (parts,) = self._meet(source)
        np.concatenate(parts, out=out)
        self._point.barrier()

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        (parts,) = self._meet(source)
        block = slice(self.rank * out.size, (self.rank + 1) * out.size)
        result = np.empty_like(out)  # `out` may lie in a part that others still read
        reduce_in_rank_order([part[block] for part in parts], result, op)
        self._point.barrier()
        np.copyto(out, result)

    def gather(self, source: np.ndarray, out: np.ndarray | None, root: int) -> None:
        (parts,) = self._meet(source)
        if out is not None:
            np.concatenate(parts, out=out)
        self._point.barrier()

    def scatter(self, source: np.ndarray | None, out: np.ndarray, root: int) -> None:
        (parts,) = self._meet(out)
        if source is not None:
            for rank, part in enumerate(parts):
                np.copyto(part, source[rank * out.size : (rank + 1) * out.size])
        self._point.barrier()

    # --- who has what where ---

    def _meet(self, *arrays: np.ndarray) -> list[list[np.ndarray]]:
        """Return, for each array, the ranks' arrays; by then every rank has written what it had to write."""
        return self._counterparts(arrays, self._point.exchange(self._places(*arrays)))

    def _places(self, *arrays: np.ndarray) -> list[int]:
        """Return (region, offset, nbytes, dtype) of each array, one after the other."""
        places: list[int] = []
        for array in arrays:
            region, offset = self._locate(array) or (-1, 0)
            assert region >= 0 or not array.nbytes, "an array that this transport did not allocate"
            places += region, offset, array.nbytes, array.dtype.num
        return places

    def _counterparts(self, arrays: Sequence[np.ndarray], everyone: np.ndarray) -> list[list[np.ndarray]]:
        key = (everyone.tobytes(), *(array.dtype for array in arrays))
        found = self._views.get(key)
        if found is None:
            found = self._make_views(arrays, everyone.reshape(self.world_size, -1, 4).tolist())
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            if all(array.nbytes for array in arrays):  # else they are the caller's own, not to be kept
                self._views[key] = found
        return found

    def _make_views(self, arrays: Sequence[np.ndarray], places: list) -> list[list[np.ndarray]]:
        for other in places[1:]:
            if [place[2:] for place in other] != [place[2:] for place in places[0]]:
                raise _mismatch([place[0][2] for place in places])
        return [
            [self._regions[region].view(rank, offset, array) for rank, (region, offset, *_) in enumerate(column)]
            if array.nbytes
            else [array] * self.world_size
            for array, column in zip(arrays, zip(*places, strict=True), strict=True)
        ]

    def close(self) -> None:
        """Free communicators and windows; a window whose memory some rank still uses stays until the process ends."""
        self.free_unused()
        self._regions.clear()
        self._views.clear()
        self._window.Unlock_all()
        self._window.Free()
        self._second_comm.Free()
        self.comm.Free()


def _mismatch(sizes: list[int]) -> MismatchError:
    listed = ", ".join(map(str, sizes))
    return MismatchError(
        f"array: expected the same length and dtype on every rank, got {listed} bytes on ranks 0 to {len(sizes) - 1}"
    )


def _memory(window: Any, rank: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(window.Shared_query(rank)[0], np.uint8, nbytes)


def _own_bytes(world_size: int) -> int:
    return 2 * world_size * SLOT_BYTES + MeetingPoint.nbytes(world_size)


def _has_room(comm: Any, nbytes: int) -> bool:
    """Say what rank 0 sees: a window larger than what /dev/shm has left ends in SIGBUS."""
    return comm.bcast(_free_shared_memory() >= nbytes + _SPARE_BYTES, 0)


def _free_shared_memory() -> int:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize
