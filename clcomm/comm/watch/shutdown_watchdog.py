"""The shutdown watchdog: a thread that reports what blocks a rank's exit after its program, and ends a hung job.

A non-daemon thread or an exit handler can block the exit forever; the other ranks then wait in MPI_Finalize, where no
Python code runs that could report it. So the rank itself reports it, and ends the job at the time-out.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable

from clcomm.comm.watch import endings
from clcomm.comm.watch.job import this_job
from clcomm.comm.watch.source_location import place_of_thread
from clcomm.comm.watch.time_limits import Limits

#: Interval at which the watchdog checks whether the program's threads still run collectives.
INTERVAL_S = 0.5


class ShutdownWatchdog:
    """A daemon thread that sleeps until the program has ended.

    Args:
        limits: times until the report and until the end of the job, from the program's end or the last collective.
        activity: returns a number that grows with each collective, None during one.
        end_by_force: called with the exit code before the job ends, in case its end is blocked too.
    """

    def __init__(self, limits: Limits, activity: Callable[[], int | None], end_by_force: Callable[[int], None]):
        self.limits, self._activity, self._end_by_force = limits, activity, end_by_force
        self._is_over = threading.Event()
        # concurrent.futures uses this private function too: handlers of atexit run only after threads are joined.
        getattr(threading, "_register_atexit", atexit.register)(self._is_over.set)
        threading.Thread(target=self._watch, name="clcomm-shutdown-watchdog", daemon=True).start()

    def _watch(self) -> None:
        self._is_over.wait()
        began, activity, has_warned = time.monotonic(), self._activity(), False
        while True:
            time.sleep(min(INTERVAL_S, self.limits.interval_s))
            before, activity = activity, self._activity()
            if activity is None or activity != before:
                began = time.monotonic()  # a thread still works; a running collective has its own watchdog
            waited_s = time.monotonic() - began
            if waited_s > self.limits.timeout_s:
                self._end_job(waited_s)
                return
            if waited_s > self.limits.stall_warning_s and not has_warned:
                has_warned = True
                limit_s = self.limits.timeout_s
                then = f"; after {limit_s:g} s the job ends" if limit_s < math.inf else ""
                endings.print_line(f"clcomm: {self._report(waited_s)}{then}")

    def _report(self, waited_s: float) -> str:
        rank = this_job().record.rank
        return f"rank {rank} has not ended {waited_s:.1f} s after its program: it waits for {remains()}"

    def _end_job(self, waited_s: float) -> None:
        self._end_by_force(endings.TIMED_OUT)
        endings.print_line(f"clcomm: {self._report(waited_s)}; the limit is {self.limits.timeout_s:g} s, the job ends")
        endings.abort(endings.TIMED_OUT)


def remains() -> str:
    """Return what blocks this process's exit: its non-daemon threads, else the running exit handler."""
    main = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if threads:
        listed = (f"{thread.name!r}{_at(thread.ident)}" for thread in threads)
        return f"thread {', '.join(listed)}, which is no daemon"
    return f"an exit handler{_at(main.ident)}"


def _at(identifier: int | None) -> str:
    place = "" if identifier is None else place_of_thread(identifier)
    return f" at {place}" if place else ""
