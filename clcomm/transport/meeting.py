"""Where the ranks of a host meet: counters in shared memory, several times faster there than MPI's barrier.

Each rank has a cell: a counter that it alone advances, and two sets of a tag and a few words that it alone writes. A
rank that has advanced its counter waits until all counters have come as far; whatever was written before is then seen
by all. The tag tells what a rank has come for: ranks that meet for different things learn of it together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from clcomm.errors import MismatchError

#: Words (int64) of a cell: the counter on a cache line of its own, then two sets of a tag and up to 15 words.
_COUNTER_WORDS, _SET_WORDS = 8, 16
_CELL_WORDS = _COUNTER_WORDS + 2 * _SET_WORDS
#: Polls between two looks at MPI, which may need us to move on what we started earlier.
_POLLS_BETWEEN_PROGRESS = 256


class MeetingPoint:
    """Barrier and all-gather of a few words between ranks that share memory.

    memory: `nbytes(world_size)` zeroed bytes that are one memory on all ranks. fence: a memory barrier.
    progress: lets MPI move on; called now and then while waiting.
    """

    def __init__(
        self,
        memory: np.ndarray,
        rank: int,
        world_size: int,
        fence: Callable[[], object],
        progress: Callable[[], object],
    ):
        cells = memory.view(np.int64).reshape(world_size, _CELL_WORDS)
        self._counters = cells[:, 0].data  # a memoryview: reading one word takes 40 ns
        self._sets = [cells[:, start : start + _SET_WORDS] for start in (_COUNTER_WORDS, _COUNTER_WORDS + _SET_WORDS)]
        self._tags = [words[:, 0].data for words in self._sets]
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._fence, self._progress = fence, progress
        self._count = 0

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Return how much memory a meeting point of so many ranks needs."""
        return world_size * _CELL_WORDS * 8

    @property
    def parity(self) -> int:
        """0 or 1, in turn: which of two buffers may be written before the next meeting.

        The other one may still be read by ranks that are on their way to it.
        """
        return (self._count + 1) & 1

    def barrier(self, tag: int = 0) -> None:
        """Return when every rank has come; what each wrote before is then seen by all.

        Raises MismatchError on every rank when some rank came with another tag.
        """
        tags = self._tags[self.parity]
        self._count = count = self._count + 1
        tags[self._rank] = tag
        self._fence()
        counters = self._counters
        counters[self._rank] = count
        polls = 0
        for other in self._others:
            while counters[other] < count:
                os.sched_yield()  # there may be more ranks than cores
                polls += 1
                if polls % _POLLS_BETWEEN_PROGRESS == 0:
                    self._progress()
        self._fence()
        for other in self._others:
            if tags[other] != tag:
                raise in_different_operations(tags.tolist())

    def exchange(self, words: Sequence[int]) -> np.ndarray:
        """Return every rank's words, int64, (world_size, len(words)); up to 15 of them."""
        everyone = self._sets[self.parity][:, 1 : len(words) + 1]
        everyone[self._rank] = words
        self.barrier()
        return everyone.copy()


def in_different_operations(tags: list[int]) -> MismatchError:
    """Return the error for ranks that came for different prepared operations, from all ranks' tags."""
    return MismatchError(
        f"collective: expected all ranks in the same prepared operation (0: none), got numbers "
        f"{', '.join(map(str, tags))} on ranks 0 to {len(tags) - 1}; call them in one order"
    )
