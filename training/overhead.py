"""How much of a step is neither kernels nor communication: Python, launches, copies of batches."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

#: One step in so many is measured, which waits for the device at both ends: at first, so that a short run has enough
#: samples, and from then on, so that a long one hardly pays for them.
SAMPLE_EVERY, LATER_EVERY, ENOUGH = 10, 50, 20
_KEPT_SAMPLES = 401


class Overhead:
    """Measures single steps of a run: kernels by OpenCL's events, communication by the Communicator's clock.

    profile: a `with` block that gives an object with `seconds` and `kernel_s`; None for engines that have none.
    communicated: returns the seconds in which collectives have kept the rank from anything else so far; what went on
    behind computing is not in it. The figures are medians of the last samples, which a rank that loses its core in
    some of them does not change; None before the first sample.
    """

    def __init__(
        self, profile: Callable[[], AbstractContextManager[Any]] | None, communicated: Callable[[], float]
    ) -> None:
        self._profile, self._communicated = profile, communicated
        self._steps = 0
        self._kernels_s: deque[float] = deque(maxlen=_KEPT_SAMPLES)
        self._launches_s: deque[float] = deque(maxlen=_KEPT_SAMPLES)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Stand around a step, without its wait for data; measures it when it is its turn."""
        self._steps += 1
        every = SAMPLE_EVERY if len(self._kernels_s) < ENOUGH else LATER_EVERY
        if self._profile is None or self._steps % every:
            yield
            return
        before = self._communicated()
        with self._profile() as profile:
            yield
        own_s = profile.seconds - (self._communicated() - before)
        self._kernels_s.append(profile.kernel_s)
        self._launches_s.append(max(0.0, own_s - profile.kernel_s))

    @property
    def kernel_s(self) -> float | None:
        """What the kernels of a step take."""
        return _median(self._kernels_s)

    @property
    def launch_s(self) -> float | None:
        """What Python, launches and copies of batches take of a step: what neither kernels nor collectives do."""
        return _median(self._launches_s)

    def share(self, step_s: float) -> float | None:
        """Return `launch_s` as a part of a whole step of so many seconds, 0 to 1."""
        return None if self.launch_s is None or not step_s else min(1.0, self.launch_s / step_s)


def _median(samples: deque[float]) -> float | None:
    return statistics.median(samples) if samples else None
