"""The `shared` transport: reductions in an MPI shared-memory window, read in place.

Every rank's part of the window can be read by all ranks of the host. Each rank folds its own shard of a range over
all parts, in rank order, and writes it where everyone reads it: with a `common` array as target every byte is read
once and written once. Two barriers frame the work: all data is written, all shards are folded.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from clcomm.layout import shard_bounds
from clcomm.transport.base import Pending, Transport
from clcomm.transport.mpi import SHARD_MULTIPLE
from clcomm.transport.reduction import reduce_in_rank_order

_PAGE = 4096
#: Part of /dev/shm that is left to others.
_SPARE_BYTES = 1 << 20


@dataclass
class _Region:
    """One window: a part for each rank, or a single common part that all ranks write."""

    window: Any
    parts: list[np.ndarray]
    common: bool
    start: int
    stop: int


class SharedTransport(Transport):
    """Collectives on arrays that `allocate` or `allocate_common` returned, or slices of them.

    All ranks of `comm` are on one host. Slices have to lie at the same offset on every rank.
    """

    name = "shared"

    def __init__(self, comm: Any, pending: deque[Pending] | None = None):
        self.comm = comm
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        self._second_comm = comm.Dup()
        self._pending = deque() if pending is None else pending
        self._regions: list[_Region] = []

    # --- memory ---

    def fits(self, nbytes: int) -> bool:
        """Say, alike on every rank, whether /dev/shm has room for `nbytes` a rank (a larger window ends in SIGBUS)."""
        return self.comm.bcast(_free_shared_memory() >= nbytes * self.world_size + _SPARE_BYTES, 0)

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes of this rank, which the others can read; collective, same size everywhere."""
        return self._allocate(nbytes, nbytes, common=False)

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` zeroed bytes that are one memory on all ranks; collective, same size everywhere."""
        return self._allocate(nbytes, nbytes if self.rank == 0 else 0, common=True)

    def _allocate(self, nbytes: int, own_bytes: int, common: bool) -> np.ndarray:
        from mpi4py import MPI

        padded = -(-own_bytes // _PAGE) * _PAGE
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        window = MPI.Win.Allocate_shared(padded, 1, info, self.comm)
        info.Free()
        owners = [0] if common else range(self.world_size)
        parts = [np.frombuffer(window.Shared_query(r)[0], np.uint8)[:nbytes] for r in owners]  # type: ignore[call-overload]
        mine = parts[0 if common else self.rank]
        if not common or self.rank == 0:
            mine[:] = 0
        self.comm.Barrier()
        start = mine.__array_interface__["data"][0]
        self._regions.append(_Region(window, parts, common, start, start + nbytes))
        return mine

    def holds(self, *arrays: np.ndarray) -> bool:
        """Say whether all of these arrays lie in memory that this transport allocated."""
        return all(self._locate(array) is not None for array in arrays)

    def is_common(self, array: np.ndarray) -> bool:
        """Say whether the array lies in memory that all ranks share as one."""
        located = self._locate(array)
        return located is not None and located[0].common

    def _locate(self, array: np.ndarray) -> tuple[_Region, int] | None:
        address = array.__array_interface__["data"][0]
        for region in self._regions:
            if region.start <= address and address + array.nbytes <= region.stop:
                return region, address - region.start
        return None

    def _parts(self, array: np.ndarray) -> tuple[list[np.ndarray], bool]:
        """Return every rank's array at this array's place, and whether they are one common memory."""
        located = self._locate(array)
        assert located is not None
        region, offset = located
        return [p[offset : offset + array.nbytes].view(array.dtype) for p in region.parts], region.common

    # --- collectives ---

    def barrier(self) -> None:
        self.comm.Barrier()

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        self.comm.Barrier()
        self._reduce_own_shard(source, out, op)
        self.comm.Barrier()

    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        def fold() -> Any:
            self._reduce_own_shard(source, out, op)
            return self._second_comm.Ibarrier()

        return Pending(self._pending, self.comm.Ibarrier(), fold)

    def _reduce_own_shard(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        bounds = shard_bounds(source.size, self.world_size, SHARD_MULTIPLE)
        shard = slice(bounds[self.rank], bounds[self.rank + 1])
        rows = [part[shard] for part in self._parts(source)[0]]
        targets, _ = self._parts(out)
        first = targets[0][shard]
        # Folding straight into the first target is right unless that memory is also a later row of the sum: rank 0's
        # part is row 0 when the caller reduces in place, and no row at all when `out` is another region.
        reduce_in_rank_order(rows, first, op)
        for target in targets[1:]:
            np.copyto(target[shard], first)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        parts, common = self._parts(array)
        self.comm.Barrier()
        if not common and self.rank != root:
            np.copyto(array, parts[root])
        self.comm.Barrier()

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        parts, common = self._parts(source)
        self.comm.Barrier()
        for r in range(self.world_size):
            out[r * source.size : (r + 1) * source.size] = parts[0 if common else r]
        self.comm.Barrier()

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        parts, common = self._parts(source)
        block = slice(self.rank * out.size, (self.rank + 1) * out.size)
        rows = [parts[0 if common else r][block] for r in range(self.world_size)]
        self.comm.Barrier()
        result = np.empty_like(out)  # `out` may lie in a part that others still read
        reduce_in_rank_order(rows, result, op)
        self.comm.Barrier()
        np.copyto(out, result)

    def gather(self, source: np.ndarray, out: np.ndarray | None, root: int) -> None:
        self.comm.Barrier()
        if out is not None:
            parts, common = self._parts(source)
            for r in range(self.world_size):
                out[r * source.size : (r + 1) * source.size] = parts[0 if common else r]
        self.comm.Barrier()

    def scatter(self, source: np.ndarray | None, out: np.ndarray, root: int) -> None:
        self.comm.Barrier()
        if source is not None:
            for r, part in enumerate(self._parts(out)[0]):
                np.copyto(part, source[r * out.size : (r + 1) * out.size])
        self.comm.Barrier()

    def close(self) -> None:
        """Free the windows; arrays that lie in them must not be touched afterwards."""
        for region in self._regions:
            region.window.Free()
        self._regions.clear()
        self._second_comm.Free()


def _free_shared_memory() -> int:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize
