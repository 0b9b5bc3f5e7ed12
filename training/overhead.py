"""How much of a step is neither kernels nor communication: Python, launches, copies of batches."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from clcomm.stats import CommStats

#: One step in so many is measured, which waits for the device at both ends.
SAMPLE_EVERY = 50
_KEPT_SAMPLES = 101


class Overhead:
    """Measures single steps of a run: kernels by OpenCL's events, collectives by the Communicator's clock.

    profile: a `with` block that gives an object with `seconds` and `kernel_s`; None for engines that have none.
    `share` is the median over the last samples of what is left of a step, 0 to 1; None before the first sample.
    """

    def __init__(self, profile: Callable[[], AbstractContextManager[Any]] | None, stats: CommStats):
        self._profile, self._stats = profile, stats
        self._steps = 0
        self._shares: deque[float] = deque(maxlen=_KEPT_SAMPLES)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Stand around a step, without its wait for data; measures it when it is its turn."""
        self._steps += 1
        if self._profile is None or self._steps % SAMPLE_EVERY:
            yield
            return
        before = self._communication_s()
        with self._profile() as profile:
            yield
        own_s = profile.seconds - (self._communication_s() - before)
        if own_s > 0:
            self._shares.append(max(0.0, 1.0 - profile.kernel_s / own_s))

    @property
    def share(self) -> float | None:
        """The part of a step in which neither kernels nor collectives ran."""
        return statistics.median(self._shares) if self._shares else None

    def _communication_s(self) -> float:
        return self._stats.seconds
