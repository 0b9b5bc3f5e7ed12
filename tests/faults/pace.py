"""The current slow-down of this machine by other processes."""

from __future__ import annotations

import threading
import time
from types import TracebackType

#: A probe's computing time, longer than the time slice of a process that has just woken up, and its pause.
BURST_S, PAUSE_S = 0.02, 0.18


class Pace:
    """Measures the slow-down within this context; limits apply to seconds divided by `slowdown()`."""

    def __init__(self) -> None:
        self._taken_s = self._computed_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)

    def __enter__(self) -> Pace:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def slowdown(self) -> float:
        """Return elapsed time over processor time; 1 if the probe never waited for a processor."""
        return max(1.0, self._taken_s / self._computed_s) if self._computed_s else 1.0

    def _probe(self) -> None:
        while not self._stop.wait(PAUSE_S):
            began_s, computed_s = time.perf_counter(), time.thread_time()
            while time.thread_time() - computed_s < BURST_S:
                pass
            self._taken_s += time.perf_counter() - began_s
            self._computed_s += time.thread_time() - computed_s
