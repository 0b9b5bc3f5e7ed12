"""A collective that goes on while its caller does something else."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from clcomm.transport import Pending


class Handle:
    """A started all-reduce: `wait()` returns its result, `done()` says without blocking whether it is there."""

    def __init__(self, pending: Pending, result: np.ndarray, finished: Callable[[float], None], started_s: float):
        self._pending, self._result, self._finished = pending, result, finished
        self._spent_s = started_s
        self._reported = False

    def wait(self) -> np.ndarray:
        """Return the reduced array when it is complete on this rank."""
        begin = time.perf_counter()
        self._pending.wait()
        self._report(begin)
        return self._result

    def done(self) -> bool:
        """Make progress and say whether the result is complete."""
        begin = time.perf_counter()
        done = self._pending.done()
        if done:
            self._report(begin)
        else:
            self._spent_s += time.perf_counter() - begin
        return done

    def _report(self, begin: float) -> None:
        if not self._reported:
            self._reported = True
            self._finished(self._spent_s + time.perf_counter() - begin)
