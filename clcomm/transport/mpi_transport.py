"""The `mpi` transport: bytes travel through MPI's buffer calls, arithmetic is ours.

MPI may sum in any order it likes, and does so differently for different lengths, so a result would depend on the bucket
size; we move the parts and fold them in rank order instead (reduce-scatter by all-to-all, then all-gather: as many
bytes as MPI's own algorithm for long messages, see Thakur, Rabenseifner and Gropp, 2005).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from clcomm.layout import shard_bounds
from clcomm.transport import mpi
from clcomm.transport.base import Pending, Transport
from clcomm.transport.meeting import Meeting, NoMeeting
from clcomm.transport.memory import places_elsewhere, require_alike
from clcomm.transport.reduction import prepared_reduction

#: Up to this many bytes of the whole world's data, one all-gather and a local fold beat two phases.
GATHER_LIMIT_BYTES = 64 << 10
#: Shards start at multiples of two cache lines' worth of float32, where OpenCL devices take memory as it lies.
SHARD_MULTIPLE = 32


class MpiTransport(Transport):
    """Collectives through an mpi4py communicator that nobody else uses.

    What is begun without being prepared is compared by its length, its dtype and the tag announced at `meeting`.
    pending: the queue of unfinished operations; transports whose operations a caller mixes share one.
    prepare_fold: returns what reduces the ranks' rows, `prepare_fold(rows, out, op)`; in rank order unless given.
    """

    name = "mpi"
    meeting: Meeting = NoMeeting()

    def __init__(
        self,
        comm: Any,
        pending: deque[Pending] | None = None,
        prepare_fold: Callable[[list[np.ndarray], np.ndarray, str], Callable[[], None]] = prepared_reduction,
    ):
        self._byte = mpi.byte()
        self.comm, self.prepare_fold = comm, prepare_fold
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        # Later phases of pending operations run here, in an order of their own.
        self._second_comm = comm.Dup()
        self.pending: deque[Pending] = deque() if pending is None else pending

    def barrier(self) -> None:
        self.comm.Barrier()

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        self.prepare_all_reduce(source, out, op)()

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        if source.nbytes * self.world_size <= GATHER_LIMIT_BYTES:
            return self._prepare_gathered_reduction(source, out, op)
        comm, exchange = self.comm, _ShardExchange(self, source, out, op)

        def reduce() -> None:
            comm.Alltoallv(exchange.sent, exchange.received)
            exchange.fold()
            comm.Allgatherv(exchange.shard, exchange.gathered)

        return reduce

    def _prepare_gathered_reduction(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        comm, rows = self.comm, np.empty((self.world_size, source.size), source.dtype)
        sent, received = [source, self._byte], [rows, self._byte]
        fold, result = self.prepare_fold(list(rows), rows[0], op), rows[0]

        def reduce() -> None:
            comm.Allgather(sent, received)
            fold()
            np.copyto(out, result)  # it may be common to all ranks: only final values go there, never a partial sum

        return reduce

    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        own = np.array([self.meeting.tag, *places_elsewhere(source, out)], np.int64)
        everyone = np.empty((self.world_size, own.size), np.int64)
        scatter, gather = self.later_phases(source, out, op)

        def compare_and_scatter() -> Any:
            require_alike(everyone, arrays=2)
            return scatter()

        first = self.comm.Iallgather(own, everyone)
        return Pending(self.pending, first, compare_and_scatter, gather, meets=True)

    def prepare_start(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], Pending]:
        def start() -> Pending:
            exchange = _ShardExchange(self, source, out, op)
            first = self.comm.Ialltoallv(exchange.sent, exchange.received)
            return Pending(self.pending, first, lambda: self._gather_shards(exchange))

        return start

    def later_phases(self, source: np.ndarray, out: np.ndarray, op: str) -> list[Callable[[], Any]]:
        """Return the phases of an all-reduce that is itself a later part of another pending operation."""
        exchange = _ShardExchange(self, source, out, op)
        return [
            lambda: self._second_comm.Ialltoallv(exchange.sent, exchange.received),
            lambda: self._gather_shards(exchange),
        ]

    def _gather_shards(self, exchange: _ShardExchange) -> Any:
        exchange.fold()
        return self._second_comm.Iallgatherv(exchange.shard, exchange.gathered)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        self.comm.Bcast([array, self._byte], root)

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        self.comm.Allgather([source, self._byte], [out, self._byte])

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        rows = np.empty((self.world_size, out.size), source.dtype)
        self.comm.Alltoall([source, self._byte], [rows, self._byte])
        self.prepare_fold(list(rows), out, op)()

    def gather(self, source: np.ndarray, out: np.ndarray | None, root: int) -> None:
        self.comm.Gather([source, self._byte], None if out is None else [out, self._byte], root)

    def scatter(self, source: np.ndarray | None, out: np.ndarray, root: int) -> None:
        self.comm.Scatter(None if source is None else [source, self._byte], [out, self._byte], root)

    def revoke(self) -> None:
        mpi.revoke(self.comm, self._second_comm)

    def close(self) -> None:
        self._second_comm.Free()


class _ShardExchange:
    """One all-reduce's buffers: each rank collects its own shard from all, folds it, and hands it to all."""

    def __init__(self, transport: MpiTransport, source: np.ndarray, out: np.ndarray, op: str):
        world_size, rank, itemsize, byte = transport.world_size, transport.rank, source.itemsize, transport._byte
        bounds = shard_bounds(source.size, world_size, SHARD_MULTIPLE)
        counts = [(stop - start) * itemsize for start, stop in itertools.pairwise(bounds)]
        starts = [start * itemsize for start in bounds[:-1]]
        own = bounds[rank + 1] - bounds[rank]
        rows, shard = np.empty((world_size, own), source.dtype), np.empty(own, source.dtype)
        own_starts = [own * itemsize * r for r in range(world_size)]
        self.sent = [source, counts, starts, byte]
        self.received = [rows, [own * itemsize] * world_size, own_starts, byte]
        self.fold = transport.prepare_fold(list(rows), shard, op)
        self.shard = [shard, byte]
        self.gathered = [out, counts, starts, byte]
