"""Rendezvous of ranks before data moves: a barrier that also compares the operations of all ranks.

On one host it uses shared memory, several times faster than MPI's barrier. Each rank has a cell that it alone writes: a
counter, a tag and its arrival time, which are on one cache line, and a board of a few words; of all but the counter
there are two, used in turn. A rank advances its counter and waits until all counters have reached it; all earlier
writes are then visible to all ranks. Beside the cells are words that any rank writes, with atomic operations, to divide
work after a rendezvous (`work_queue.py`).
Through MPI a rendezvous is a small all-reduce of the tag, or on one host an all-gather of tag and arrival time.

The tag identifies a rank's operation. All ranks compare all tags, so a mismatch is raised on every rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Protocol

import numpy as np

from clcomm.base.errors import MismatchError
from clcomm.comm.transport.futex import POLLS, Futex

#: Words (int64) of a cell: the counter, tag and arrival of even rendezvous, those of odd ones, and three that are
#: unused; then two boards. kernels/fold.cl has the first five words too.
_LINE_WORDS, _BOARD_WORDS = 8, 16
_CELL_WORDS = _LINE_WORDS + 2 * _BOARD_WORDS
#: Bytes of the words that divide work: a cache line.
_CLAIMS_BYTES = 64
#: No rank is known to have arrived last.
UNKNOWN = -1, 0.0


def last_of(arrivals: list[int]) -> tuple[int, float]:
    """Return the rank that arrived last, and how many seconds after the one before it; arrivals: in ns, by rank."""
    in_order = sorted(arrivals)
    if len(in_order) < 2:
        return UNKNOWN
    last_ns = in_order[-1]
    return arrivals.index(last_ns), (last_ns - in_order[-2]) * 1e-9


class DifferentOperations(MismatchError):
    """Ranks called different operations; raised on every rank."""

    def __init__(self) -> None:
        super().__init__(
            "collective: expected all ranks in the same one, with arrays of equal length and dtype, but they differ; "
            "call the same collectives in the same order"
        )


class Rendezvous(Protocol):
    """The interface; `announce` precedes the first rendezvous of an operation."""

    tag: int
    #: Nanoseconds that this rank has waited in rendezvous since `announce`.
    waited_ns: int
    #: The rank that arrived last at the first rendezvous since `announce`, and how many seconds after the one before
    #: it; UNKNOWN before that, and on several hosts.
    last: tuple[int, float]

    def announce(self, tag: int) -> None:
        """Set this rank's operation, which all following rendezvous compare."""

    def barrier(self, kind: int = 0) -> None:
        """Block until every rank has arrived; all ranks' earlier writes are then visible.

        Raises DifferentOperations on every rank if the sums of tag and `kind` differ; see `length_and_dtype`.
        """


def length_and_dtype(array: np.ndarray) -> int:
    """Return a number that identifies an array's length and dtype, as the `kind` of a rendezvous."""
    return array.nbytes << 6 | array.dtype.num & 63


class HostRendezvous:
    """Barrier and all-gather of a few words between ranks that share memory.

    Args:
        memory: `nbytes(world_size)` zeroed bytes, shared by all ranks.
        rank: this rank's number.
        world_size: the number of ranks.
        fence: a full memory barrier.
        progress: see Futex.
        sleeps: see Futex.
    """

    def __init__(
        self,
        memory: np.ndarray,
        rank: int,
        world_size: int,
        fence: Callable[[], object],
        progress: Callable[[], object],
        sleeps: bool = False,
    ):
        cells, claims, futex = np.split(memory, np.cumsum([world_size * _CELL_WORDS * 8, _CLAIMS_BYTES]))
        self._futex = Futex(futex, rank, world_size, fence, progress, sleeps)
        #: Of the ranks' work, and the marks of those that sleep: int64.
        self.claims, self.sleepers = claims.view(np.int64), self._futex.marks
        self.cells = cells = cells.view(np.int64).reshape(world_size, _CELL_WORDS)
        self.counters = cells[:, 0].data  # a memoryview: reading one word takes 20 ns
        starts = _LINE_WORDS, _LINE_WORDS + _BOARD_WORDS
        self._boards = [cells[:, start : start + _BOARD_WORDS] for start in starts]
        self._columns = [(cells[:, 1 + 2 * side].data, cells[:, 2 + 2 * side].data) for side in (0, 1)]
        self._own_words = [board[rank].data for board in self._boards]
        self.rank, self._ranks = rank, world_size
        self._others = [other for other in range(world_size) if other != rank]
        self._fence = fence
        #: Whether ranks have a core each, so that a short wait is best spent polling.
        self.polls = not sleeps
        self.tag = self.waited_ns = 0
        self.last = UNKNOWN

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Return the number of bytes that a rendezvous of `world_size` ranks needs."""
        return world_size * _CELL_WORDS * 8 + _CLAIMS_BYTES + Futex.nbytes(world_size)

    def yields(self) -> int:
        """Return how often a kernel that this thread calls may yield the core, as the futex does, until it returns."""
        return POLLS if self._futex.is_program_thread else 0

    @property
    def parity(self) -> int:
        """0 or 1, in turn: which of two buffers this rank may write before the next rendezvous.

        Late ranks may still read the other buffer.
        """
        return (self.counters[self.rank] + 1) & 1

    def announce(self, tag: int) -> None:
        self.tag, self.waited_ns, self.last = tag, 0, UNKNOWN

    def barrier(self, kind: int = 0) -> None:
        rank = self.rank
        count = self.counters[rank] + 1
        tags, arrivals = self._columns[count & 1]
        tags[rank] = tag = self.tag + kind
        arrivals[rank] = arrived_ns = perf_counter_ns()
        self._advance(self.counters, count)
        self.wait(arrived_ns)
        self.compare(tag)

    def leave(self) -> None:
        """Block until every rank has arrived: a barrier without comparison, later in the same operation."""
        arrived_ns = perf_counter_ns()
        self._advance(self.counters, self.counters[self.rank] + 1)
        self.wait(arrived_ns)

    def _advance(self, counters: memoryview, count: int) -> None:
        """Advance this rank's counter."""
        self._fence()
        counters[self.rank] = count
        self._fence()

    def wait(self, arrived_ns: int, polled: int = 0) -> None:
        """Wait until all counters have reached this rank's; the last rank to arrive wakes the sleeping ones.

        polled: how often this rank has polled since it arrived.
        """
        counters, count = self.counters, self.counters[self.rank]
        waited = False
        for other in self._others:
            if counters[other] < count:
                self._futex.wait(counters, other, count, polled)
                waited = True
        self._fence()
        if waited:
            self.waited_ns += perf_counter_ns() - arrived_ns
        else:
            self._futex.wake()

    def wait_for(self, words: memoryview, count: int, polled: int = 0) -> None:
        """Block until a word that other ranks advance, the first of these, has reached `count`; as `wait`."""
        begin_ns = perf_counter_ns()
        self._futex.wait(words, 0, count, polled)
        self._fence()
        self.waited_ns += perf_counter_ns() - begin_ns

    def arrive(self, counters: memoryview, count: int) -> None:
        """Advance this rank's counter among others than the rendezvous', without blocking, and wake who sleeps.

        As at a rendezvous, the last rank does so; of two that come at once, one at least sees both counters.
        """
        self._advance(counters, count)
        for counter in counters:
            if counter < count:
                return
        self._futex.wake()

    def await_all(self, counters: memoryview, count: int, progress: Callable[[], object]) -> None:
        """Block until each rank's counter has reached `count`; counters: as `arrive`'s, progress: see Futex.wait."""
        for other in self._others:
            if counters[other] < count:
                self._futex.wait(counters, other, count, progress=progress)
        self._fence()

    def wake(self) -> None:
        """Wake the ranks that sleep; call it after the write that they wait for."""
        self._futex.wake()

    def compare(self, tag: int) -> None:
        """Note the arrivals at this rendezvous, unless it is a later one of the operation, and compare the tags."""
        tags, arrivals = self._columns[self.counters[self.rank] & 1]
        if self.last is UNKNOWN:
            self.last = last_of(arrivals.tolist())
        if tags.tolist().count(tag) != self._ranks:
            raise DifferentOperations

    def exchange(self, words: Sequence[int], kind: int = 0) -> np.ndarray:
        """Return every rank's words, int64, (world_size, len(words)); up to 16 of them."""
        parity, count = self.parity, len(words)
        self._own_words[parity][:count] = array("l", words)
        self.barrier(kind)
        return self._boards[parity][:, :count].copy()


class MpiRendezvous:
    """A rendezvous through MPI: of several hosts, or of ranks without shared memory.

    Args:
        alike: compares a number over the ranks; see `mpi_communicators.comparison`.
        fence: a full memory barrier.
    """

    def __init__(self, alike: Callable[[int, int], tuple[bool, list[int] | None]], fence: Callable[[], object]):
        self._alike, self._fence = alike, fence
        self.tag = self.waited_ns = 0
        self.last = UNKNOWN

    def announce(self, tag: int) -> None:
        self.tag, self.waited_ns, self.last = tag, 0, UNKNOWN

    def barrier(self, kind: int = 0) -> None:
        arrived_ns = perf_counter_ns()
        self._fence()
        same, arrivals = self._alike(self.tag + kind, arrived_ns)
        self._fence()
        if arrivals is not None and self.last is UNKNOWN:
            self.last = last_of(arrivals)
        self.waited_ns += perf_counter_ns() - arrived_ns
        if not same:
            raise DifferentOperations


class NoRendezvous:
    """No comparison: for a world of one rank, or where checks are off."""

    tag = waited_ns = 0
    last = UNKNOWN

    def announce(self, tag: int) -> None:
        pass

    def barrier(self, kind: int = 0) -> None:
        pass
