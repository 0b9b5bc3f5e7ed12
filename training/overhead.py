"""The part of a step that is neither kernels nor communication: Python, launches, copies of batches."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

#: A measured step waits for the device at both ends. Every 11th step is measured until there are 20 samples, then every
#: 53rd, so that a short run has enough samples and a long one loses little time. They are primes: what comes every 5 or
#: 50 steps, such as a policy's outer step, would otherwise be in all samples.
SAMPLE_EVERY, LATER_EVERY, ENOUGH = 11, 53, 20
_KEPT_SAMPLES = 401
_UNMEASURED = nullcontext()


class Overhead:
    """Measures some steps of a run: kernels by OpenCL's events, communication by the Communicator's clock.

    The figures are medians of the last samples, which a few disturbed steps don't change; None before the first sample.

    Args:
        profile: returns a context whose object has `seconds` and `kernel_s` at its end; None: the engine has none.
        communicated: returns the exposed communication time so far, in seconds.
    """

    def __init__(
        self, profile: Callable[[], AbstractContextManager[Any]] | None, communicated: Callable[[], float]
    ) -> None:
        self._profile, self._communicated = profile, communicated
        self._steps = 0
        self._kernels_s: deque[float] = deque(maxlen=_KEPT_SAMPLES)
        self._launches_s: deque[float] = deque(maxlen=_KEPT_SAMPLES)

    def sampled(self) -> AbstractContextManager[None]:
        """Return a context for a step without its wait for data, which measures the step when it is due."""
        self._steps += 1
        every = SAMPLE_EVERY if len(self._kernels_s) < ENOUGH else LATER_EVERY
        if self._profile is None or self._steps % every:
            return _UNMEASURED
        return self._measured(self._profile())

    @contextmanager
    def _measured(self, profiled: AbstractContextManager[Any]) -> Iterator[None]:
        before = self._communicated()
        with profiled as profile:
            yield
        own_s = profile.seconds - (self._communicated() - before)
        self._kernels_s.append(profile.kernel_s)
        self._launches_s.append(max(0.0, own_s - profile.kernel_s))

    @property
    def kernel_s(self) -> float | None:
        """Seconds of a step's kernels."""
        return _median(self._kernels_s)

    @property
    def launch_s(self) -> float | None:
        """Seconds of a step that are neither kernels nor collectives: Python, launches, copies of batches."""
        return _median(self._launches_s)

    def share(self, step_s: float) -> float | None:
        """Return `launch_s` as a share, 0 to 1, of a step of `step_s`."""
        return None if self.launch_s is None or not step_s else min(1.0, self.launch_s / step_s)


def _median(samples: deque[float]) -> float | None:
    return statistics.median(samples) if samples else None
