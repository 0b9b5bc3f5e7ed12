"""Shares of a step's samples for ranks of unequal speed, from their measured speeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError

#: The label under which the Communicator's stats count the exchange of speeds.
BALANCE = "balance"
#: A share is at most so many times an equal one, which bounds the memory of a rank's batches.
MOST_TIMES = 4
#: Shares are multiples of an equal share's part of this, so that few sizes of batches occur.
_PARTS = 16
#: A window has so many steps at most.
_MOST_STEPS = 1000


class Balancer:
    """Divides each step's samples between ranks in proportion to their speed, measured again and again.

    Now and then the ranks exchange the seconds that a sample took them, without the time in which they communicated or
    waited, and compute the shares by which the slowest rank takes least time. The seconds are means, as a rank that
    shares its core with another process is slow in some steps only, and half of each new figure is the one before. The
    ranks keep the shares that they have unless the new ones make that time shorter by `least_gain`, by these figures
    and by the latest window's alone.

    Args:
        comm: the ranks.
        batch_size: samples of an equal share.
        window: the least number of steps between two exchanges, and of those before the first one.
        window_s: the seconds between two exchanges after that.
        least_gain: from 1 up; 1.05 is a step shorter by 5%.

    Attributes:
        shares: the samples of each rank in a whole step; they add up to as many as equal shares.
        changes: how many times the shares have changed.

    Raises ArgumentError for a batch_size or a window below 1, and a least_gain below 1.
    """

    #: Steps that do not count, at the start and after a change of shares: they record kernels for batches of new size.
    WARM_UP_STEPS = 3

    def __init__(
        self, comm: Communicator, batch_size: int, *, window: int = 10, window_s: float = 0.5, least_gain: float = 1.05
    ):
        for name, value in (("batch_size", batch_size), ("window", window), ("least_gain", least_gain)):
            if not 1 <= value < np.inf:
                raise ArgumentError(f"{name}: expected a number from 1 up, got {value!r}")
        self._comm, self.batch_size, self._least_gain = comm, batch_size, least_gain
        self._least_window, self._window_s = window, window_s
        self.shares = (batch_size,) * comm.size
        self.changes = 0
        self._window, self._skipped = window, 0
        self._costs = np.zeros(comm.size)  # seconds a sample of each rank; 0: not known
        self._begin_window()

    def _begin_window(self) -> None:
        self._steps, self._samples, self._seconds = 0, 0, 0.0

    def step_finished(self, samples: int, seconds: float) -> bool:
        """Note how long this rank's samples of a step took; return whether `shares` changed.

        Every rank calls it after each step; at the end of a window it is collective. A step without samples says
        nothing about speed.
        """
        if self._skipped < self.WARM_UP_STEPS:
            self._skipped += 1
            return False
        self._steps += 1
        if samples:
            self._samples, self._seconds = self._samples + samples, self._seconds + seconds
        return self._steps >= self._window and self._exchange()

    def _exchange(self) -> bool:
        """Gather the ranks' times, and take the shares that fit them if that gains enough; the same on every rank."""
        own = np.array([[self._seconds, self._samples]])
        seconds, samples = self._comm.all_gather(own, label=BALANCE).reshape(-1, 2).T
        slowest_s = seconds.max() / self._steps
        self._window = max(self._least_window, min(_MOST_STEPS, math.ceil(self._window_s / max(slowest_s, 1e-9))))
        self._begin_window()
        if not (seconds.all() and samples.all()):
            return False
        costs = seconds / samples
        self._costs = np.where(self._costs, (self._costs + costs) / 2, costs)
        found = balanced_shares(self._costs.tolist(), self.batch_size)
        if min(step_s(each, self.shares) / step_s(each, found) for each in (self._costs, costs)) < self._least_gain:
            return False
        self.shares, self._skipped = found, 0
        self.changes += 1
        return True


def balanced_shares(costs: Sequence[float], batch_size: int) -> tuple[int, ...]:
    """Return shares, for as many ranks as `costs`, that add up to `batch_size` a rank, with the least time of a step.

    They are multiples of about a 16th of `batch_size`, each at least one such multiple and at most MOST_TIMES of
    `batch_size`. Ranks get one after another to where the time stays least, which is optimal as times only grow.

    costs: seconds a sample of each rank, above zero.
    """
    grain = max(number for number in range(1, max(1, batch_size // _PARTS) + 1) if batch_size % number == 0)
    most = MOST_TIMES * batch_size // grain
    units = [1] * len(costs)
    for _ in range(len(costs) * (batch_size // grain - 1)):
        free = [rank for rank, count in enumerate(units) if count < most]
        units[min(free, key=lambda rank: ((units[rank] + 1) * costs[rank], rank))] += 1
    return tuple(count * grain for count in units)


def step_s(costs: Iterable[float], shares: Sequence[int]) -> float:
    """Return the seconds of the rank that takes longest."""
    return max(float(cost) * share for cost, share in zip(costs, shares, strict=True))
