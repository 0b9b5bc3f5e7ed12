"""Shares of a step's samples, or of its logical shards, for ranks of unequal speed, from their measured speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.sync.logical_shards import LogicalShards

#: The label under which the Communicator's stats count the exchange of speeds.
BALANCE = "balance"
#: A share is at most so many times an equal one, which bounds the memory of a rank's batches.
MOST_TIMES = 4
#: Shares are multiples of an equal share's part of this, so that few sizes of batches occur.
_PARTS = 16
#: A window has so many steps at most, as each one's time is exchanged.
_MOST_STEPS = 256


class Balancer:
    """Divides each step's samples between ranks by their speed, measured again and again.

    Now and then the ranks exchange the seconds that a sample took them in each step, without the time in which they
    communicated or waited, and compute the shares by which the slowest rank of a step takes least time in the mean. A
    rank that shares its core with another process is slow in some steps only: it gets fewer samples than its mean speed
    would have it, as the others wait for it in those. The ranks keep the shares that they have unless the new ones make
    that time shorter by `least_gain`, by the steps of the latest two windows and by the latest window's alone.

    With logical shards, which are whole, each rank's share is the samples of so many of them, dealt to it in order.

    Args:
        comm: the ranks.
        batch_size: samples of an equal share, or of a logical shard.
        window: the least number of steps between two exchanges, and of those before the first one.
        window_s: the seconds between two exchanges after that.
        least_gain: from 1 up; 1.05 is a step shorter by 5%.
        shards: the logical shards, as they are dealt now; None: there are none.

    Attributes:
        shares: the samples of each rank in a whole step; they add up to as many as equal shares.
        changes: how many times the shares have changed.

    Raises ArgumentError for a batch_size or a window below 1, and a least_gain below 1.
    """

    #: Steps that do not count, at the start and after a change of shares: they record kernels for batches of new size.
    WARM_UP_STEPS = 3

    def __init__(
        self, comm: Communicator, batch_size: int, *, window: int = 10, window_s: float = 0.5, least_gain: float = 1.05,
        shards: LogicalShards | None = None,
    ):  # fmt: skip
        for name, value in (("batch_size", batch_size), ("window", window), ("least_gain", least_gain)):
            if not 1 <= value < np.inf:
                raise ArgumentError(f"{name}: expected a number from 1 up, got {value!r}")
        self._comm, self.batch_size, self._least_gain = comm, batch_size, least_gain
        self._least_window, self._window_s = window, window_s
        self._shards = None if shards is None else shards.count
        counts = (1,) * comm.size if shards is None else shards.counts
        self.shares = tuple(batch_size * count for count in counts)
        self.changes = 0
        self._window, self._skipped = math.ceil(window), 0
        self._steps: tuple[float, ...] = ()  # this rank's seconds a sample; 0: the step says nothing about speed
        self._before = np.empty((comm.size, 0))  # all ranks' steps of the window before

    def step_finished(self, samples: int, seconds: float) -> bool:
        """Note how long this rank's samples of a step took; return whether `shares` changed.

        Every rank calls it after each step; at the end of a window it is collective. A step of fewer samples than this
        rank's share, such as an epoch's last one, says nothing about speed.
        """
        if self._skipped < self.WARM_UP_STEPS:
            self._skipped += 1
            return False
        self._steps += (seconds / samples if samples >= self.shares[self._comm.rank] else 0.0,)
        return len(self._steps) >= self._window and self._exchange()

    def _exchange(self) -> bool:
        """Gather the ranks' times, and take the shares that fit them if that gains enough; the same on every rank."""
        costs = self._comm.all_gather(np.array([self._steps]), label=BALANCE).reshape(len(self.shares), -1)
        self._steps = ()
        costs = costs[:, costs.all(0)]
        if not costs.size:
            return False
        steps = math.ceil(self._window_s / max(step_s(costs, self.shares), 1e-9))
        self._window = max(math.ceil(self._least_window), min(_MOST_STEPS, steps))
        both, self._before = np.concatenate([self._before, costs], axis=1), costs
        found = balanced_shares(both, self.batch_size, self._shards)
        if min(step_s(each, self.shares) / step_s(each, found) for each in (both, costs)) < self._least_gain:
            return False
        self.shares, self._skipped = found, 0
        self.changes += 1
        return True


def balanced_shares(costs: np.ndarray, batch_size: int, shards: int | None = None) -> tuple[int, ...]:
    """Return shares that add up to `batch_size` a rank, by which the slowest rank of a step takes least time.

    They are multiples of about a 16th of `batch_size`, each at least one such multiple and at most MOST_TIMES of
    `batch_size`; of so many logical `shards`, which have `batch_size` samples each, multiples of it, and at most
    MOST_TIMES of an equal number of them.

    First they are those of least time for the ranks' mean costs: multiples go one after another to the rank where the
    time stays least, which is optimal for one step as times only grow. Then, while the mean over all steps falls, one
    multiple goes from the rank whose samples cost that mean most to the one where they cost least.

    costs: (ranks, steps), seconds a sample of each rank in each step, above zero. Equal ones give equal shares on every
    host: sums are rounded once (`math.fsum`), in whatever order a processor adds.
    """
    if shards is None:
        grain = max(number for number in range(1, max(1, batch_size // _PARTS) + 1) if batch_size % number == 0)
        total, most = len(costs) * batch_size // grain, MOST_TIMES * batch_size // grain
    else:
        grain, total, most = batch_size, shards, MOST_TIMES * -(-shards // len(costs))
    means = [math.fsum(each) for each in costs.tolist()]
    units = np.ones(len(means), int)
    for _ in range(total - len(means)):
        free = [rank for rank, count in enumerate(units) if count < most]
        units[min(free, key=lambda rank: ((units[rank] + 1) * means[rank], rank))] += 1
    while True:
        moved = _one_moved(costs, units, most)
        if moved is None or step_s(costs, moved) >= step_s(costs, units):
            return tuple((units * grain).tolist())
        units = moved


def _one_moved(costs: np.ndarray, units: np.ndarray, most: int) -> np.ndarray | None:
    """Return units of which one has gone from where it costs the mean most to where it costs least; None: none can."""
    slowest = (costs * units[:, None]).argmax(0)
    slopes = [math.fsum(own[slowest == rank]) for rank, own in enumerate(costs)]
    giver = max(range(len(units)), key=slopes.__getitem__)
    takers = [rank for rank, count in enumerate(units) if count < most and rank != giver]
    if units[giver] == 1 or not takers:
        return None
    moved = units.copy()
    moved[giver] -= 1
    moved[min(takers, key=slopes.__getitem__)] += 1
    return moved


def step_s(costs: np.ndarray, shares: Sequence[int] | np.ndarray) -> float:
    """Return the seconds of the rank that takes longest, in the mean over the steps of `costs`, (ranks, steps)."""
    return float(math.fsum((costs * np.asarray(shares)[:, None]).max(0)) / costs.shape[1])
