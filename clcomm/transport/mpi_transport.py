"""The `mpi` transport: MPI's buffer calls move bytes, clcomm does the arithmetic.

MPI's order of summation is unspecified and depends on the length, so a result would depend on the bucket size. This
transport moves the parts and folds them in rank order instead: reduce-scatter by all-to-all, then all-gather. That
moves as many bytes as MPI's own algorithm for long messages (Thakur, Rabenseifner and Gropp, 2005).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from clcomm.transport import mpi_communicators, mpi_failures
from clcomm.transport.base import Transport, require_aligned
from clcomm.transport.comparisons import Comparisons
from clcomm.transport.meeting import Meeting, NoMeeting
from clcomm.transport.mpi_messages import exchange_arrays
from clcomm.transport.mpi_runtime import Intracomm, Request
from clcomm.transport.pending import Pending
from clcomm.transport.reduction import prepared_reduction
from clcomm.transport.same_arrays import places_elsewhere, require_alike
from clcomm.transport.shards import shards

#: Up to this many bytes of all ranks' data, one all-gather and a local fold are faster than two phases.
GATHER_LIMIT_BYTES = 64 << 10
#: Where the rows of `start_gather_rows` begin, so that they can be read as any dtype.
ROW_ALIGNMENT_BYTES = 64
#: The lengths of the two arrays in a row of the comparisons, after its tag; see `places_elsewhere`.
_LENGTHS = [3, 7]


class MpiTransport(Transport):
    """Collectives through a private mpi4py communicator.

    Operations in the background compare length, dtype and the tag announced at `meeting` before data moves.

    Args:
        comm: the communicator, still owned by the caller.
        pending: the queue of unfinished operations; the transports of one Communicator share it.
        prepare_fold: `prepare_fold(rows, out, op)` returns a reduction of the ranks' rows; by default in rank order.
    """

    name = "mpi"
    meeting: Meeting = NoMeeting()
    #: The most bytes that one call moves: MPI before version 4 of the standard counts and addresses with 32 bits.
    most_bytes = 1 << 30

    def __init__(
        self,
        comm: Intracomm,
        pending: deque[Pending] | None = None,
        prepare_fold: Callable[[list[np.ndarray], np.ndarray, str], Callable[[], None]] = prepared_reduction,
    ):
        self._byte = mpi_communicators.byte()
        self.comm, self.prepare_fold = comm, prepare_fold
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        # Later phases of pending operations start in another order than calls on `comm`, so they need their own.
        self._second_comm = comm.Dup()
        self.comparisons = Comparisons(comm, self._second_comm)
        self.pending: deque[Pending] = deque() if pending is None else pending

    def barrier(self) -> None:
        self.comm.Barrier()

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        self.prepare_all_reduce(source, out, op)()

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        if source.nbytes * self.world_size <= GATHER_LIMIT_BYTES:
            return self._prepare_gathered_reduction(source, out, op)
        comm, exchanges = self.comm, self._exchanges(source, out, op)

        def reduce() -> None:
            for exchange in exchanges:
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
            np.copyto(out, result)  # `out` may be common to all ranks: write final values only, no partial sums

        return reduce

    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        return self.prepare_start(source, out, op)()

    def prepare_start(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], Pending]:
        places = places_elsewhere(source, out)
        first, *others = self.later_phases(source, out, op)

        def start() -> Pending:
            compared, everyone = self.comparisons.begin(self.meeting.tag, places)

            def compare_and_begin() -> Request:
                require_alike(everyone, arrays=2)
                require_aligned(source, out)
                return first()

            return Pending(self.pending, compared, compare_and_begin, *others, meets=True)

        return start

    def later_phases(self, source: np.ndarray, out: np.ndarray, op: str) -> list[Callable[[], Request]]:
        """Return the phases of an all-reduce that is part of another pending operation."""
        return self._phases(self._exchanges(source, out, op))

    def count_phases(self, size: int, itemsize: int) -> int:
        """Return the number of `later_phases` of an array of `size` elements."""
        return 2 * len(self._pieces(size, itemsize))

    def _exchanges(self, source: np.ndarray, out: np.ndarray, op: str) -> list[_ShardExchange]:
        pieces = self._pieces(source.size, source.itemsize)
        return [_ShardExchange(self, source[piece], out[piece], op) for piece in pieces]

    def _phases(self, exchanges: list[_ShardExchange]) -> list[Callable[[], Request]]:
        phases: list[Callable[[], Request]] = []
        for exchange in exchanges:
            phases += partial(self._scatter, exchange), partial(self._gather_shards, exchange)
        return phases

    def _scatter(self, exchange: _ShardExchange) -> Request:
        return self._second_comm.Ialltoallv(exchange.sent, exchange.received)

    def _gather_shards(self, exchange: _ShardExchange) -> Request:
        exchange.fold()
        return self._second_comm.Iallgatherv(exchange.shard, exchange.gathered)

    def _pieces(self, size: int, itemsize: int) -> list[slice]:
        """Return the slices, at least one, in which `size` elements are moved.

        Args:
            size: the number of elements.
            itemsize: the bytes that a call moves for each element, those of all ranks.
        """
        step = max(1, self.most_bytes // itemsize)
        return [slice(start, start + step) for start in range(0, max(size, 1), step)]

    def broadcast(self, array: np.ndarray, root: int) -> None:
        for piece in self._pieces(array.size, array.itemsize):
            self.comm.Bcast([array[piece], self._byte], root)

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        blocks = out.reshape(self.world_size, -1)
        for piece in self._pieces(source.size, source.itemsize * self.world_size):
            rows = np.require(blocks[:, piece], requirements="C")
            self.comm.Allgather([source[piece], self._byte], [rows, self._byte])
            _put(rows, blocks[:, piece])

    def start_all_gather(self, source: np.ndarray, out: np.ndarray) -> Pending:
        compared, everyone = self.comparisons.begin(self.meeting.tag, places_elsewhere(source, source))

        def compare_and_begin() -> Request:
            require_alike(everyone, arrays=2)
            return self._second_comm.Iallgather([source, self._byte], [out, self._byte])

        return Pending(self.pending, compared, compare_and_begin, meets=True)

    def start_gather_rows(self, source: np.ndarray, rows: list[np.ndarray]) -> Pending:
        compared, everyone = self.comparisons.begin(self.meeting.tag, places_elsewhere(source, source))

        def compare_and_begin() -> Request:
            counts = everyone[:, _LENGTHS[0]].tolist()
            everyone[:, _LENGTHS] = 0  # these may differ
            require_alike(everyone, arrays=2)
            starts = np.cumsum([0, *(count + -count % ROW_ALIGNMENT_BYTES for count in counts)]).tolist()
            whole = np.empty(starts.pop(), np.uint8)
            rows.extend(whole[start : start + count] for start, count in zip(starts, counts, strict=True))
            return self._second_comm.Iallgatherv([source, self._byte], [whole, counts, starts, self._byte])

        return Pending(self.pending, compared, compare_and_begin, meets=True)

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        blocks = source.reshape(self.world_size, -1)
        for piece in self._pieces(out.size, out.itemsize * self.world_size):
            sent = np.ascontiguousarray(blocks[:, piece])
            rows = np.empty_like(sent)
            self.comm.Alltoall([sent, self._byte], [rows, self._byte])
            self.prepare_fold(list(rows), out[piece], op)()

    def gather(self, source: np.ndarray, out: np.ndarray | None, root: int) -> None:
        blocks = None if out is None else out.reshape(self.world_size, -1)
        for piece in self._pieces(source.size, source.itemsize * self.world_size):
            if blocks is None:
                self.comm.Gather([source[piece], self._byte], None, root)
            else:
                rows = np.require(blocks[:, piece], requirements="C")
                self.comm.Gather([source[piece], self._byte], [rows, self._byte], root)
                _put(rows, blocks[:, piece])

    def scatter(self, source: np.ndarray | None, out: np.ndarray, root: int) -> None:
        blocks = None if source is None else source.reshape(self.world_size, -1)
        for piece in self._pieces(out.size, out.itemsize * self.world_size):
            sent = None if blocks is None else np.ascontiguousarray(blocks[:, piece])
            self.comm.Scatter(None if sent is None else [sent, self._byte], [out[piece], self._byte], root)

    def all_to_all(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        exchange_arrays(self.comm, sends, receives)

    def revoke(self) -> None:
        mpi_failures.revoke(self.comm, self._second_comm)

    def close(self) -> None:
        self._second_comm.Free()


def _put(rows: np.ndarray, target: np.ndarray) -> None:
    """Copy rows to their target, unless they are in it already."""
    if not np.may_share_memory(rows, target):
        np.copyto(target, rows)


class _ShardExchange:
    """The buffers of one all-reduce: each rank receives its shard from all ranks, folds it, and sends it to all."""

    def __init__(self, transport: MpiTransport, source: np.ndarray, out: np.ndarray, op: str):
        world_size, rank, itemsize, byte = transport.world_size, transport.rank, source.itemsize, transport._byte
        cuts = shards(source, world_size)
        counts = [(cut.stop - cut.start) * itemsize for cut in cuts]
        starts = [cut.start * itemsize for cut in cuts]
        own = cuts[rank].stop - cuts[rank].start
        rows = np.empty((world_size, own), source.dtype)
        own_starts = [own * itemsize * each for each in range(world_size)]
        self.sent = [source, counts, starts, byte]
        self.received = [rows, [own * itemsize] * world_size, own_starts, byte]
        self.fold = transport.prepare_fold(list(rows), rows[0], op)
        self.shard = [rows[0], byte]
        self.gathered = [out, counts, starts, byte]
