"""Finished steps on their way to a run's metrics and callbacks, a few at a time.

After a step's kernels this code is no longer in the processor's caches: to count one step takes several times as long
as one of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from training.metrics import Metrics, StepRecord

#: The most steps of a batch, and the longest time from its first step to its last.
MOST_STEPS, LONGEST_S = 32, 0.1


class Follower(Protocol):
    """The part of training.trainer.Callback that is used here."""

    every_step: bool

    def step_finished(self, record: StepRecord) -> None: ...


class StepLog:
    """Keeps steps until they are a batch, or one of the callbacks wants every step at once.

    Args:
        callbacks: receive the steps, in their order; the list may change whenever no step is kept.
        now: returns the time in seconds.
    """

    def __init__(self, callbacks: Sequence[Follower], now: Callable[[], float]):
        self.metrics = Metrics()
        self._callbacks, self._now = callbacks, now
        self._kept: list[StepRecord] = []
        self._most, self._until_s = 1, 0.0

    def add(self, record: StepRecord) -> None:
        """Keep a step, and hand on those that are kept if this is due."""
        self._kept.append(record)
        if len(self._kept) >= self._most or self._now() >= self._until_s:
            self.hand_on()

    def hand_on(self) -> None:
        """Hand all steps that are kept to the metrics and to the callbacks."""
        kept, self._kept = self._kept, []
        for record in kept:
            self.metrics.add(record)
            for callback in self._callbacks:
                callback.step_finished(record)
        self._most = 1 if any(each.every_step for each in self._callbacks) else MOST_STEPS
        self._until_s = self._now() + LONGEST_S
