"""The `mpi` transport: MPI's buffer calls move bytes, clcomm does the arithmetic.

MPI's order of summation is unspecified and depends on the length, so a result would depend on the bucket size. This
transport moves the parts and folds them in rank order instead: reduce-scatter by all-to-all, then all-gather. That
moves as many bytes as MPI's own algorithm for long messages (Thakur, Rabenseifner and Gropp, 2005).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from clcomm.base.schedules import Schedule, Transfer
from clcomm.comm.transport import mpi_communicators, mpi_failures
from clcomm.comm.transport.base import Transport, places_elsewhere, require_aligned, require_alike
from clcomm.comm.transport.comparisons import Comparisons
from clcomm.comm.transport.mpi_messages import Message, Messages, exchange_arrays
from clcomm.comm.transport.mpi_runtime import Intracomm, Request
from clcomm.comm.transport.pending import Pending, advance_started
from clcomm.comm.transport.reduction import in_sequence, partial_op, prepared_reduction, reduce_in_rank_order
from clcomm.comm.transport.rendezvous import NoRendezvous, Rendezvous
from clcomm.comm.transport.shards import shards

#: Up to this many bytes of all ranks' data, one all-gather and a local fold are faster than two phases.
GATHER_LIMIT_BYTES = 64 << 10
#: Where the rows of `start_gather_rows` begin, so that they can be read as any dtype.
ROW_ALIGNMENT_BYTES = 64
#: The lengths of the two arrays in a row of the comparisons, after its tag; see `places_elsewhere`.
_LENGTHS = [3, 7]


class MpiTransport(Transport):
    """Collectives through a private mpi4py communicator.

    Operations in the background compare length, dtype and the tag announced at `rendezvous` before data moves.

    Args:
        comm: the communicator, still owned by the caller.
        pending: the queue of unfinished operations; the transports of one Communicator share it.
        prepare_fold: `prepare_fold(rows, out, op)` returns a reduction of the ranks' rows; by default in rank order.

    Attributes:
        background: the communicator of pending operations' later phases.
        byte: MPI's datatype of a byte.
    """

    name = "mpi"
    rendezvous: Rendezvous = NoRendezvous()
    #: The most bytes that one call moves: MPI before version 4 of the standard counts and addresses with 32 bits.
    most_bytes = 1 << 30

    def __init__(
        self,
        comm: Intracomm,
        pending: deque[Pending] | None = None,
        prepare_fold: Callable[[list[np.ndarray], np.ndarray, str], Callable[[], None]] = prepared_reduction,
    ):
        self.byte = mpi_communicators.names_of(comm).byte
        if self.byte is None:
            self.name = "memory"
        self.comm, self.prepare_fold = comm, prepare_fold
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        # Later phases of pending operations start in another order than calls on `comm`, so they need their own.
        self.background = comm.Dup()
        self.comparisons = Comparisons(comm, self.background)
        self.pending: deque[Pending] = deque() if pending is None else pending

    def barrier(self) -> None:
        self.comm.Barrier()

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        self.prepare_all_reduce(source, out, op)()

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        if source.nbytes * self.world_size > GATHER_LIMIT_BYTES:
            return in_sequence([exchange.run for exchange in self._exchanges(source, out, op)])
        # Of few bytes every rank gets all arrays, and folds them.
        rows = np.empty((self.world_size, source.size), source.dtype)
        gather = partial(self.comm.Allgather, [source, self.byte], [rows, self.byte])
        # `out` may be common to all ranks: it gets final values, no partial sums.
        return in_sequence([gather, self.prepare_fold(list(rows), rows[0], op), partial(np.copyto, out, rows[0])])

    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        return self.prepare_start(source, out, op)()

    def prepare_start(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], Pending]:
        first, *others = self.later_phases(source, out, op)

        def begin(everyone: np.ndarray) -> Request:
            require_alike(everyone, arrays=2)
            require_aligned(source, out)
            return first()

        return partial(self._start, places_elsewhere(source, out), begin, *others)

    def _start(
        self, places: list[int], begin: Callable[[np.ndarray], Request], *others: Callable[[], Request]
    ) -> Pending:
        """Start the operation that was announced last: first ranks compare `places`, then `begin` gets all of them."""
        compared, everyone = self.comparisons.begin(self.rendezvous.tag, places)
        return Pending(self.pending, compared, partial(begin, everyone), *others, meets=True)

    def later_phases(self, source: np.ndarray, out: np.ndarray, op: str) -> list[Callable[[], Request]]:
        """Return the phases of an all-reduce that is part of another pending operation."""
        exchanges = self._exchanges(source, out, op)
        return [phase for exchange in exchanges for phase in (exchange.scatter, exchange.gather_shards)]

    def count_phases(self, size: int, itemsize: int) -> int:
        """Return the number of `later_phases` of an array of `size` elements."""
        return 2 * len(self._pieces(size, itemsize))

    def _exchanges(self, source: np.ndarray, out: np.ndarray, op: str) -> list[_ShardExchange]:
        pieces = self._pieces(source.size, source.itemsize)
        return [_ShardExchange(self, source[piece], out[piece], op) for piece in pieces]

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
            self.comm.Bcast([array[piece], self.byte], root)

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        blocks = out.reshape(self.world_size, -1)
        for piece in self._pieces(source.size, source.itemsize * self.world_size):
            rows = np.require(blocks[:, piece], requirements="C")
            self.comm.Allgather([source[piece], self.byte], [rows, self.byte])
            _put(rows, blocks[:, piece])

    def start_all_gather(self, source: np.ndarray, out: np.ndarray) -> Pending:
        def begin(everyone: np.ndarray) -> Request:
            require_alike(everyone, arrays=2)
            return self.background.Iallgather([source, self.byte], [out, self.byte])

        return self._start(places_elsewhere(source, source), begin)

    def start_gather_rows(self, source: np.ndarray, rows: list[np.ndarray]) -> Pending:
        return self._start(places_elsewhere(source, source), partial(self._begin_gather_rows, source, rows))

    def _begin_gather_rows(self, source: np.ndarray, rows: list[np.ndarray], everyone: np.ndarray) -> Request:
        counts = everyone[:, _LENGTHS[0]].tolist()
        everyone[:, _LENGTHS] = 0  # these may differ
        require_alike(everyone, arrays=2)
        starts = np.cumsum([0, *(count + -count % ROW_ALIGNMENT_BYTES for count in counts)]).tolist()
        whole = np.empty(starts.pop(), np.uint8)
        rows.extend(whole[start : start + count] for start, count in zip(starts, counts, strict=True))
        return self.background.Iallgatherv([source, self.byte], [whole, counts, starts, self.byte])

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        blocks = source.reshape(self.world_size, -1)
        for piece in self._pieces(out.size, out.itemsize * self.world_size):
            sent = np.ascontiguousarray(blocks[:, piece])
            rows = np.empty_like(sent)
            self.comm.Alltoall([sent, self.byte], [rows, self.byte])
            self.prepare_fold(list(rows), out[piece], op)()

    def all_to_all(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        exchange_arrays(self.comm, sends, receives)

    def revoke(self) -> None:
        mpi_failures.revoke(self.comm, self.background)

    def close(self) -> None:
        self.background.Free()


def _put(rows: np.ndarray, target: np.ndarray) -> None:
    """Copy rows to their target, unless they are in it already."""
    if not np.may_share_memory(rows, target):
        np.copyto(target, rows)


class _ShardExchange:
    """The buffers of one all-reduce: each rank receives its shard from all ranks, folds it, and sends it to all."""

    def __init__(self, transport: MpiTransport, source: np.ndarray, out: np.ndarray, op: str):
        world_size, rank, itemsize, byte = transport.world_size, transport.rank, source.itemsize, transport.byte
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
        self._background, self._scatter = transport.background, transport.comm.Alltoallv
        # MPICH's Allgatherv sends in pieces of 32 KiB and waits out the link's latency after each, these two do not.
        to_all = [rows[0], [own * itemsize] * world_size, [0] * world_size, byte]
        #: Sends this rank's shard, folded, to all.
        self.gather = (
            partial(transport.comm.Allgather, self.shard, [out, byte])
            if len(set(counts)) == 1
            else partial(transport.comm.Alltoallv, to_all, self.gathered)
        )

    def run(self) -> None:
        """Do it all."""
        self._scatter(self.sent, self.received)
        self.fold()
        self.gather()

    def scatter(self) -> Request:
        """Begin to receive this rank's shard from all ranks: the first phase in the background."""
        return self._background.Ialltoallv(self.sent, self.received)

    def gather_shards(self) -> Request:
        """Fold this rank's shard, and begin to send it to all: the second phase."""
        self.fold()
        return self._background.Iallgatherv(self.shard, self.gathered)


# --- An all-reduce that sends the messages of a schedule from rank to rank, one round after another. ---

_TAG = 12


class Round(NamedTuple):
    """A finished round: its number from 1 up, its begin by time.perf_counter(), and what this rank sent in it."""

    number: int
    began_s: float
    seconds: float
    messages: int
    nbytes: int


class ScheduledAllReduce:
    """All-reduces by a schedule, through MPI's messages, on any ranks of one Communicator.

    Results have the same bits on every rank, but not those of the transports: the order of the sum is the schedule's.

    Args:
        comm: the mpi4py communicator, still owned by the caller; None in a world of one.
        rank: this rank.
        schedule: who sends what when.
        finished: called after each round.

    Attributes:
        name: the algorithm's.
    """

    def __init__(self, comm: Intracomm, rank: int, schedule: Schedule, finished: Callable[[Round], None]):
        self.name, self._schedule, self._rank = schedule.name, schedule, rank
        self._messages = None if comm is None else Messages(comm)
        self._finished = finished

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce `source` over the ranks into `out` on every rank; they may be the same array."""
        work = source.copy()  # `out` may be common to all ranks: it gets final values only
        for number, transfers in enumerate(self._schedule.rounds, 1):
            began_s = perf_counter()
            sent = self._exchange(work, transfers, partial_op(op))
            self._finished(Round(number, began_s, perf_counter() - began_s, len(sent), sum(sent)))
        reduce_in_rank_order([work], work, op, self._schedule.ranks)
        np.copyto(out, work)

    def _exchange(self, work: np.ndarray, transfers: tuple[Transfer, ...], op: str) -> list[int]:
        """Send and receive this rank's messages of a round; return the bytes of each that it sent."""
        bounds, messages = self._schedule.bounds(work.size), self._messages
        assert messages is not None  # a world of one has no rounds
        started: list[Message] = []
        received: list[tuple[Transfer, np.ndarray]] = []
        for each in transfers:
            if each.receiver == self._rank:
                received.append((each, np.empty(bounds[each.last] - bounds[each.first], work.dtype)))
                started.append(messages.receive(received[-1][1], each.sender, _TAG))
        sent = [work[bounds[each.first] : bounds[each.last]] for each in transfers if each.sender == self._rank]
        receivers = [each.receiver for each in transfers if each.sender == self._rank]
        started += [messages.send(part, to, _TAG) for part, to in zip(sent, receivers, strict=True)]
        while started := [each for each in started if not each.done()]:
            advance_started()
            os.sched_yield()
        if received:
            first = received[0][0]
            own = work[bounds[first.first] : bounds[first.last]]
            rows = {each.sender: values for each, values in received}
            if first.adds:
                rows[self._rank] = own.copy()
            reduce_in_rank_order([rows[rank] for rank in sorted(rows)], own, op, 1)
        return [part.nbytes for part in sent]
