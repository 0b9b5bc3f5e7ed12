"""Reductions in shared memory that are prepared once and then started: counters take the place of MPI's requests.

A rank that starts one says so with a counter and goes on. Whoever looks and finds that all have started folds its own
shard and counts that too; the result is there when all shards are folded. Nobody waits before it has to.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from time import perf_counter, perf_counter_ns

import numpy as np

from clcomm.transport.memory import HostMemory
from clcomm.transport.pending import Pending

#: Bytes of a rank's two counters, and of when it advanced each, on a cache line of their own.
_LINE = 64
#: Reductions whose counters lie in one window: windows are few, buckets may be many.
_TOGETHER = 256
_POLLS_BETWEEN_PROGRESS = 16


class Counters:
    """Two counters of each rank for every prepared reduction, in windows that hold many of them."""

    def __init__(self, memory: HostMemory):
        self._memory = memory
        self._free: list[np.ndarray] = []

    def take(self) -> np.ndarray | None:
        """Return int64 (ranks, 8), zero, common to all ranks; None where /dev/shm has no room. Collective."""
        if not self._free:
            ranks, nbytes = self._memory.ranks, _TOGETHER * self._memory.ranks * _LINE
            if not self._memory.fits(nbytes, common=True):
                return None
            window = self._memory.allocate(nbytes, common=True).view(np.int64)
            self._free = list(window.reshape(_TOGETHER, ranks, _LINE // 8))
        return self._free.pop()

    def close(self) -> None:
        """Let go of the memory."""
        self._free.clear()


class StartedReduction:
    """One all-reduce, prepared: `start` begins it, and the Pending that it returns folds this rank's shard in time.

    fold: does that, when all ranks have started. A reduction is started again only after its Pending was waited for.
    """

    def __init__(self, memory: HostMemory, counters: np.ndarray, pending: deque[Pending], fold: Callable[[], None]):
        self._started = counters[:, 0].data, counters[:, 2].data
        self._folded = counters[:, 1].data, counters[:, 3].data
        self._rank, self._fence, self._progress = memory.rank, memory.fence, memory.comm.Iprobe
        self._queue, self._fold = pending, fold
        self._current: Pending
        self._count = 0

    def start(self) -> Pending:
        """Tell the others that this rank's array is written."""
        self._count += 1
        self._current = Pending(self._queue, self._advance(self._started), self._fold_own)
        return self._current

    def _fold_own(self) -> _Reached:
        self._fold()
        return self._advance(self._folded)

    def _advance(self, words: tuple[memoryview, memoryview]) -> _Reached:
        counters, times = words
        times[self._rank] = perf_counter_ns()
        self._fence()
        counters[self._rank] = self._count
        return _Reached(counters, times, self._count, self._fence, self._progress, self._note)

    def _note(self, times: list[int]) -> None:
        """Note when each rank came to a meeting, the first or the second, and that this one waited for them there."""
        pending = self._current
        if pending.arrivals is None:
            pending.arrivals, pending.waits = times, []
        pending.waits.append((times[self._rank] * 1e-9, perf_counter()))  # type: ignore[union-attr]


class _Reached:
    """A request, as MPI's, that is complete when every rank's counter has come as far; `tell` is told when each did."""

    def __init__(
        self,
        counters: memoryview,
        times: memoryview,
        count: int,
        fence: Callable[[], object],
        progress: Callable[[], object],
        tell: Callable[[list[int]], None],
    ):
        self._counters, self._times, self._count = counters, times, count
        self._fence, self._progress, self._tell = fence, progress, tell

    def Test(self) -> bool:
        count = self._count
        for counter in self._counters:
            if counter < count:
                return False
        self._fence()
        self._tell(self._times.tolist())  # before anyone can begin anew: that takes what this rank does next
        return True

    def Wait(self) -> None:
        polls = 0
        while not self.Test():
            os.sched_yield()  # there may be more ranks than cores
            polls += 1
            if polls % _POLLS_BETWEEN_PROGRESS == 0:
                self._progress()
