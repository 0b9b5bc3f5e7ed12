"""Where ranks meet before data moves: they wait for each other, and learn whether all have come for the same thing.

On one host that is memory, several times faster than MPI's barrier. Each rank has a cell: a counter that it alone
advances, and two boards, used in turn, that it alone writes: a tag, the time of its arrival and a few words. A rank
that has advanced its counter waits until all counters have come as far; whatever was written before is then seen by
all. Through MPI it is a small all-reduce of the tag over several hosts, and on one an all-gather of tag and arrival.

The tag tells what a rank has come for. All ranks compare all of them, so those that differ learn of it together.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from clcomm.errors import MismatchError
from clcomm.transport.bell import Bell

#: Words (int64) of a cell: the counter on a cache line of its own, then two boards of tag, arrival and 14 words.
_COUNTER_WORDS, _BOARD_WORDS, _FIRST_WORD = 8, 16, 2
_CELL_WORDS = _COUNTER_WORDS + 2 * _BOARD_WORDS


class DifferentOperations(MismatchError):
    """Ranks met and had come for different operations; every rank raises it."""

    def __init__(self) -> None:
        super().__init__(
            "collective: expected all ranks in the same one, with arrays of equal length and dtype, but they differ; "
            "call the same collectives in the same order"
        )


class Meeting(Protocol):
    """What both kinds of meeting offer; the first meeting of an operation follows its announcement."""

    tag: int
    #: Nanoseconds this rank has waited in meetings since the announcement.
    waited_ns: int
    #: When each rank came to the first meeting since the announcement (perf_counter_ns), where one clock tells.
    arrivals: list[int] | None

    def announce(self, tag: int) -> None:
        """Say what this rank comes for from now on; all meetings compare it."""

    def barrier(self, kind: int = 0) -> None:
        """Return when every rank has come; what each wrote before is then seen by all.

        Raises DifferentOperations on every rank where the sums of tag and `kind` differ; see `kind_of`.
        """


def kind_of(array: np.ndarray) -> int:
    """Return an array's length and dtype as a number."""
    return array.nbytes << 6 | array.dtype.num & 63


class MeetingPoint:
    """Barrier and all-gather of a few words between ranks that share memory.

    memory: `nbytes(world_size)` zeroed bytes that are one memory on all ranks. fence: a memory barrier.
    progress, sleeps: see Bell.
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
        cells, bell = np.split(memory, [world_size * _CELL_WORDS * 8])
        self._bell = Bell(bell, rank, world_size, fence, progress, sleeps)
        cells = cells.view(np.int64).reshape(world_size, _CELL_WORDS)
        self.counters = cells[:, 0].data  # a memoryview: reading one word takes 20 ns
        self._boards = [cells[:, start : start + _BOARD_WORDS] for start in (8, 8 + _BOARD_WORDS)]
        self._columns = [(board[:, 0].data, board[:, 1].data) for board in self._boards]
        self._own_words = [board[rank, _FIRST_WORD:].data for board in self._boards]
        self._rank, self._ranks = rank, world_size
        self._others = [other for other in range(world_size) if other != rank]
        self._fence = fence
        self._count = 0
        self.tag = self.waited_ns = 0
        self.arrivals: list[int] | None = None

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Return how much memory a meeting point of so many ranks needs."""
        return world_size * _CELL_WORDS * 8 + Bell.nbytes(world_size)

    @property
    def parity(self) -> int:
        """0 or 1, in turn: which of two buffers may be written before the next meeting.

        The other one may still be read by ranks that are on their way to it.
        """
        return (self._count + 1) & 1

    def announce(self, tag: int) -> None:
        self.tag, self.waited_ns, self.arrivals = tag, 0, None

    def barrier(self, kind: int = 0) -> None:
        self._count = count = self._count + 1
        tags, arrivals = self._columns[count & 1]
        rank = self._rank
        tags[rank] = tag = self.tag + kind
        arrivals[rank] = came_ns = perf_counter_ns()
        self._come(count, came_ns)
        if self.arrivals is None:
            self.arrivals = arrivals.tolist()
        if tags.tolist().count(tag) != self._ranks:
            raise DifferentOperations

    def leave(self) -> None:
        """Return when every rank has come: a barrier of ranks that have met before in the same operation."""
        self._count = count = self._count + 1
        self._come(count, perf_counter_ns())

    def _come(self, count: int, came_ns: int) -> None:
        """Advance this rank's counter and wait for the others; who finds that all have come rings for who sleeps."""
        fence, counters = self._fence, self.counters
        fence()
        counters[self._rank] = count
        fence()
        waited = False
        for other in self._others:
            if counters[other] < count:
                self._bell.wait(counters, other, count)
                waited = True
        fence()
        if waited:
            self.waited_ns += perf_counter_ns() - came_ns
        else:
            self._bell.ring()

    def exchange(self, words: Sequence[int], kind: int = 0) -> np.ndarray:
        """Return every rank's words, int64, (world_size, len(words)); up to 14 of them."""
        parity, count = self.parity, len(words)
        self._own_words[parity][:count] = array("l", words)
        self.barrier(kind)
        return self._boards[parity][:, _FIRST_WORD : _FIRST_WORD + count].copy()


class WorldMeeting:
    """A meeting through MPI: of several hosts, or of ranks without shared memory.

    alike: see `mpi.comparison`. fence: a memory barrier.
    """

    def __init__(self, alike: Callable[[int, int], tuple[bool, list[int] | None]], fence: Callable[[], Any]):
        self._alike, self._fence = alike, fence
        self.tag = self.waited_ns = 0
        self.arrivals: list[int] | None = None

    def announce(self, tag: int) -> None:
        self.tag, self.waited_ns, self.arrivals = tag, 0, None

    def barrier(self, kind: int = 0) -> None:
        came_ns = perf_counter_ns()
        self._fence()
        same, arrivals = self._alike(self.tag + kind, came_ns)
        self._fence()
        if self.arrivals is None:
            self.arrivals = arrivals
        self.waited_ns += perf_counter_ns() - came_ns
        if not same:
            raise DifferentOperations


class NoMeeting:
    """Ranks that do not compare what they call: a rank that is alone, or all where nobody wants it."""

    tag = waited_ns = 0
    arrivals: list[int] | None = None

    def announce(self, tag: int) -> None:
        pass

    def barrier(self, kind: int = 0) -> None:
        pass
