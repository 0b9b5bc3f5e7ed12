"""A rank's logical shards side by side, for layers whose statistics are of all shards at once.

Each shard computes in a thread of its own, of which one runs at a time. Where a layer needs what all shards have, its
shard waits and the next one takes its turn; when all of this rank's wait, the ranks exchange, and the first goes on. So
no kernel's shape, and no order of sums, depends on which rank has a shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.sync.logical_shards import LogicalShards


class _Abandoned(BaseException):
    """Ends a shard's thread after another shard's error."""


class ShardTurns:
    """Lets a rank's shards take turns, and gathers what all shards have.

    Args:
        comm: the ranks.
        resume, suspend: called with a shard before and after each of its turns.
        finish: called in place of `suspend` after its last turn.
    """

    def __init__(
        self, comm: Communicator, resume: Callable[[int], None], suspend: Callable[[int], None],
        finish: Callable[[int], None],
    ):  # fmt: skip
        self.comm = comm
        self._resume, self._suspend, self._finish = resume, suspend, finish
        self._current: _Turn | None = None

    def run(self, shards: LogicalShards, compute: Callable[[int], object]) -> None:
        """Call `compute` for each of this rank's shards; collective where a layer gathers.

        Raises the first shard's error that there is, and ArgumentError where shards gather other things.
        """
        turns = [_Turn(shard, compute) for shard in shards.own]
        try:
            while not all(turn.is_done for turn in turns):
                for turn in turns:
                    self._take(turn)
                waiting = [turn for turn in turns if not turn.is_done]
                if waiting:
                    self._exchange(shards, turns, waiting)
        finally:
            self._current = None
            for turn in turns:
                turn.abandon()

    def gather(self, values: np.ndarray, label: str) -> np.ndarray:
        """Return the values of all shards, (shards, *values.shape); called within `compute`."""
        if self._current is None:
            raise ArgumentError(
                "SyncBatchNorm: expected a forward of logical shards within sync.run_shards(model, compute), as its "
                "statistics are of all of them at once"
            )
        return self._current.wait_for(values, label)

    def _take(self, turn: _Turn) -> None:
        self._current = turn
        self._resume(turn.shard)
        turn.go_on()
        (self._finish if turn.is_done else self._suspend)(turn.shard)

    def _exchange(self, shards: LogicalShards, turns: Sequence[_Turn], waiting: Sequence[_Turn]) -> None:
        kinds = {(turn.values.shape, turn.label) for turn in waiting}
        if len(waiting) < len(turns) or len(kinds) > 1:
            self.comm.runner.refuse(
                "run_shards: expected the same layers in each shard's forward and backward, got others among those of "
                f"rank {self.comm.rank}, {shards.own}"
            )
        own = np.zeros((max(shards.counts), *waiting[0].values.shape), waiting[0].values.dtype)
        for row, turn in zip(own, waiting, strict=False):  # other ranks may have more rows
            row[...] = turn.values
        everyone = self.comm.all_gather(own, label=waiting[0].label)
        rows = np.concatenate([theirs[:count] for theirs, count in zip(everyone, shards.counts, strict=True)])
        for turn in waiting:
            turn.everyone = rows


class _Turn:
    """A shard's computation in a thread, which runs from one call of `go_on` to the return of it."""

    def __init__(self, shard: int, compute: Callable[[int], object]):
        self.shard, self.is_done = shard, False
        self.values, self.everyone, self.label = np.empty(0), np.empty(0), ""
        self._compute = compute
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"clcomm-shard-{shard}", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Run until the computation waits for other shards, or has ended; raises its error."""
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def wait_for(self, values: np.ndarray, label: str) -> np.ndarray:
        """Let other shards run, in this one's thread, until all of them have such values; return those of all."""
        self.values, self.label = values, label
        self._back.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned
        return self.everyone

    def abandon(self) -> None:
        """End the computation where it waits, and its thread."""
        self._is_abandoned = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_abandoned:
                self._compute(self.shard)
        except _Abandoned:
            pass
        except BaseException as error:  # raised in the rank's own thread
            self._error = error
        self.is_done = True
        self._back.release()
