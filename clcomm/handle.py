"""A collective that goes on while its caller does something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from clcomm.transport import Pending


class Handle:
    """A started all-reduce: `wait()` returns its result, `done()` says without blocking whether it is there.

    finished: told (seconds from `began_s` to the end, those of them that the caller spent here, failed), once.
    waiting: a context for the time in which the caller can do nothing but wait, for the watchdog to know.
    computes: says whether the caller's device computes by itself; what is spent here then is not exposed.
    """

    def __init__(
        self,
        pending: Pending,
        result: np.ndarray,
        finished: Callable[[float, float, bool], None],
        began_s: float,
        waiting: Callable[[], AbstractContextManager[None]],
    ):
        self._pending, self._result, self._finished, self._began_s = pending, result, finished, began_s
        self._waiting = waiting
        self._exposed_s = time.perf_counter() - began_s
        self._reported = False
        self.computes: Callable[[], bool] | None = None

    def wait(self) -> np.ndarray:
        """Return the reduced array when it is complete on this rank."""
        with self._waiting():
            self._watched(self._pending.wait)
        return self._result

    def done(self) -> bool:
        """Make progress and say whether the result is complete."""
        return self._watched(self._pending.done)

    def _watched(self, advance: Callable[[], Any]) -> Any:
        if self._reported:
            return advance()
        failed = True
        begin = time.perf_counter()
        try:
            result = advance()
            failed = False
            return result
        finally:
            end = time.perf_counter()
            if self.computes is None or not self.computes():
                self._exposed_s += end - begin
            if failed or self._pending.finished:
                self._reported = True
                self._finished(end - self._began_s, self._exposed_s, failed)
