"""A collective that goes on while its caller does something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from clcomm.in_flight import InFlight
from clcomm.transport import Pending


class Handle:
    """A started all-reduce: `wait()` returns its result, `done()` says without blocking whether it is there.

    began_s: when its start began; from there to now is its first visit, each call here another, of which `in_flight`
    is told.
    waiting: a context for the time in which the caller can do nothing but wait, for the watchdog to know.
    computes: says whether the caller's device computes by itself; a visit at whose end it does is none.
    """

    def __init__(
        self,
        pending: Pending,
        result: np.ndarray,
        began_s: float,
        in_flight: InFlight,
        waiting: Callable[[], AbstractContextManager[None]],
        computes: Callable[[], bool] | None = None,
    ):
        self._pending, self._result = pending, result
        self._in_flight, self._waiting, self._computes = in_flight, waiting, computes
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
        if self._pending.finished:
            self._in_flight.tell_finished()
            return advance()
        begin_s = time.perf_counter()
        try:
            return advance()
        finally:
            self._note(begin_s, time.perf_counter())

    def _note(self, begin_s: float, end_s: float) -> None:
        is_hidden = self._computes is not None and self._computes()
        self._in_flight.visited(begin_s, end_s, is_hidden=is_hidden)
