"""Reductions in shared memory, prepared once and then started: counters take the place of MPI's requests.

A rank starts one by advancing a counter, without blocking. Once all ranks have started, each folds its own shard and
advances a second counter; the result is complete when all shards are folded. A rank that waits polls and sleeps as it
does in a blocking call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter, perf_counter_ns

import numpy as np

from clcomm.comm.transport.host_memory import HostMemory
from clcomm.comm.transport.pending import Pending
from clcomm.comm.transport.rendezvous import HostRendezvous

#: Bytes of a rank's two counters and the time of each one's last advance, on a cache line of their own.
_LINE = 64
#: Between two calls into MPI of a rank that polls, however it does: MPI alone knows of ranks that died.
_PROGRESS_NS = 100_000
#: Number of reductions whose counters are in one window: MPI has few windows, a model may have many buckets.
_REDUCTIONS_PER_WINDOW = 256


class Counters:
    """Two counters of each rank for every prepared reduction, in windows that hold many of them."""

    def __init__(self, memory: HostMemory):
        self._memory = memory
        self._free: list[np.ndarray] = []

    def take(self) -> np.ndarray | None:
        """Return int64 (ranks, 8), zero, common to all ranks; None where /dev/shm has no room. Collective."""
        if not self._free:
            ranks, nbytes = self._memory.ranks, _REDUCTIONS_PER_WINDOW * self._memory.ranks * _LINE
            if not self._memory.fits(nbytes, common=True):
                return None
            window = self._memory.allocate(nbytes, common=True).view(np.int64)
            self._free = list(window.reshape(_REDUCTIONS_PER_WINDOW, ranks, _LINE // 8))
        return self._free.pop()

    def close(self) -> None:
        """Release the memory."""
        self._free.clear()


class StartedReduction:
    """A prepared all-reduce: `start` returns a Pending, which folds this rank's shard once all ranks have started.

    A reduction may be started again only when its Pending is finished.

    Args:
        memory: of the host's ranks.
        counters: as `Counters.take` returns them.
        pending: the Communicator's queue of unfinished operations.
        fold: folds this rank's shard.
    """

    def __init__(self, memory: HostMemory, counters: np.ndarray, pending: deque[Pending], fold: Callable[[], None]):
        self._started = counters[:, 0].data, counters[:, 2].data
        self._folded = counters[:, 1].data, counters[:, 3].data
        self._rank, self._fence, self._rendezvous = memory.rank, memory.fence, memory.rendezvous
        self._progress = memory.comm.Iprobe
        self._queue, self._fold = pending, fold
        self._current: Pending
        self._count = 0

    def start(self) -> Pending:
        """Start the reduction; this rank has written its array."""
        self._count += 1
        self._current = Pending(self._queue, self._advance(self._started), self._fold_own, take_back=self._take_back)
        return self._current

    def _take_back(self) -> None:
        """Undo a start, as other ranks have started something else: the next one has the same number on all ranks."""
        self._count -= 1
        self._started[0][self._rank] = self._count
        self._fence()

    def _fold_own(self) -> _Reached:
        self._fold()
        return self._advance(self._folded)

    def _advance(self, words: tuple[memoryview, memoryview]) -> _Reached:
        counters, times = words
        times[self._rank] = perf_counter_ns()
        self._rendezvous.arrive(counters, self._count)
        return _Reached(counters, times, self._count, self._rendezvous, self._fence, self._progress, self._note)

    def _note(self, times: list[int]) -> None:
        """Record each rank's arrival at the first rendezvous, and this rank's wait at the first or the second."""
        pending = self._current
        if pending.arrivals is None:
            pending.arrivals, pending.waits = times, []
        pending.waits.append((times[self._rank] * 1e-9, perf_counter()))  # type: ignore[union-attr]


class _Reached:
    """A request like MPI's, complete when every rank's counter has reached `count`; `notify` then gets their times."""

    def __init__(
        self,
        counters: memoryview,
        times: memoryview,
        count: int,
        rendezvous: HostRendezvous,
        fence: Callable[[], object],
        progress: Callable[[], object],
        notify: Callable[[list[int]], None],
    ):
        self._counters, self._times, self._count = counters, times, count
        self._rendezvous, self._fence, self._progress, self._notify = rendezvous, fence, progress, notify
        self._progressed_ns = 0

    def Test(self) -> bool:
        count = self._count
        for counter in self._counters:
            if counter < count:
                self._progress_now_and_then()
                return False
        self._fence()
        self._notify(self._times.tolist())  # before any rank can start again, which needs this rank's next advance
        return True

    def Wait(self) -> None:
        self.wait_and_look(lambda: None)

    def wait_and_look(self, look: Callable[[], object]) -> None:
        """Block until it is complete, and call `look` now and then, as often as MPI; what it raises ends the wait."""

        def progress() -> None:
            self._progress()
            look()

        self._rendezvous.await_all(self._counters, self._count, progress)
        self._notify(self._times.tolist())

    def _progress_now_and_then(self) -> None:
        """Let MPI progress earlier operations, and raise its error for a rank that died."""
        now_ns = perf_counter_ns()
        if now_ns - self._progressed_ns > _PROGRESS_NS:
            self._progressed_ns = now_ns
            self._progress()
