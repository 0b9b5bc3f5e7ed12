"""The handle of a collective in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from clcomm.collectives.in_flight import InFlightTimes
from clcomm.transport import Pending

T = TypeVar("T")


class Handle:
    """A started all-reduce: `wait()` returns its result, `done()` returns without blocking whether it is complete.

    Args:
        pending: the operation.
        result: what `wait` returns: an array, or a list of them.
        began_s: when the caller entered the call that started it (perf_counter).
        in_flight: records that call, and each call of `wait` and `done`.
        waiting: returns a context for the time in which the caller blocks, for the watchdog.
        computes: returns whether the caller's device is computing; a call counts as hidden if it is when the call ends.
    """

    def __init__(
        self,
        pending: Pending,
        result: object,
        began_s: float,
        in_flight: InFlightTimes,
        waiting: Callable[[], AbstractContextManager[None]],
        computes: Callable[[], bool] | None = None,
    ):
        self._pending, self._result = pending, result
        self._in_flight, self._waiting, self._computes = in_flight, waiting, computes
        self._record(began_s, time.perf_counter())

    def wait(self) -> Any:
        """Block until the result is complete on this rank, and return it."""
        with self._waiting():
            self._timed(self._pending.wait)
        return self._result

    def done(self) -> bool:
        """Make progress and return whether the result is complete."""
        return self._timed(self._pending.done)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, which `wait` raises."""
        return self._pending.failed

    def _timed(self, advance: Callable[[], T]) -> T:
        if self._pending.finished:
            self._in_flight.report_finished()
            return advance()
        begin_s = time.perf_counter()
        try:
            return advance()
        finally:
            self._record(begin_s, time.perf_counter())

    def _record(self, begin_s: float, end_s: float) -> None:
        is_hidden = self._computes is not None and self._computes()
        self._in_flight.add_call(begin_s, end_s, is_hidden=is_hidden)
