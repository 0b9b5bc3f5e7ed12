"""A collective that goes on while its caller does something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from clcomm.transport import Pending
from clcomm.visits import Visits


class Handle:
    """A started all-reduce: `wait()` returns its result, `done()` says without blocking whether it is there.

    finished: told (when the caller saw its end, failed), once.
    began_s: when its start began; from there to now is the first of the `visits`, each call here another.
    waiting: a context for the time in which the caller can do nothing but wait, for the watchdog to know.
    computes: says whether the caller's device computes by itself; a visit at whose end it does is none.
    """

    def __init__(
        self,
        pending: Pending,
        result: np.ndarray,
        finished: Callable[[float, bool], None],
        began_s: float,
        visits: Visits,
        waiting: Callable[[], AbstractContextManager[None]],
        computes: Callable[[], bool] | None = None,
    ):
        self._pending, self._result, self._finished = pending, result, finished
        self._visits, self._waiting, self._computes = visits, waiting, computes
        self._reported = False
        self._note(began_s, time.perf_counter())

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
        begin_s = time.perf_counter()
        try:
            result = advance()
            failed = False
            return result
        finally:
            end_s = time.perf_counter()
            self._note(begin_s, end_s)
            if failed or self._pending.finished:
                self._reported = True
                self._finished(end_s, failed)

    def _note(self, begin_s: float, end_s: float) -> None:
        if self._computes is None or not self._computes():
            self._visits.add(begin_s, end_s)
