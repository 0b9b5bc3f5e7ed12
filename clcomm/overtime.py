"""Watches the time between the end of a rank's program and the end of its process.

A thread that is no daemon, or an exit handler, can keep the process for ever; the other ranks then wait for it in
MPI_Finalize, where no Python runs that could say so. A thread of the rank itself reports what it waits for, and ends
the job at the time-out.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable

from clcomm import job, lookout
from clcomm.limits import Limits
from clcomm.place import place_of_thread

#: How often the thread looks whether collectives still go on, as threads of the program may run them.
INTERVAL_S = 0.5


class Overtime:
    """A daemon thread that sleeps until the program is over.

    limits: after how long to report, and to end the job. activity: a number that grows with each collective, None while
    one is under way. end_by_force: called before the job ends, with its exit code.
    """

    def __init__(self, limits: Limits, activity: Callable[[], int | None], end_by_force: Callable[[int], None]):
        self.limits, self._activity, self._end_by_force = limits, activity, end_by_force
        self._is_over = threading.Event()
        # Called before threads are joined, as concurrent.futures needs it too; exit handlers alone would be too late.
        getattr(threading, "_register_atexit", atexit.register)(self._is_over.set)
        threading.Thread(target=self._watch, name="clcomm-overtime", daemon=True).start()

    def _watch(self) -> None:
        self._is_over.wait()
        began, activity, has_warned = time.monotonic(), self._activity(), False
        while True:
            time.sleep(min(INTERVAL_S, self.limits.interval_s))
            before, activity = activity, self._activity()
            if activity is None or activity != before:
                began = time.monotonic()  # a thread still works; and a collective is watched by the watchdog
            waited_s = time.monotonic() - began
            if waited_s > self.limits.timeout_s:
                self._end_job(waited_s)
                return
            if waited_s > self.limits.stall_warning_s and not has_warned:
                has_warned = True
                limit_s = self.limits.timeout_s
                then = f"; after {limit_s:g} s the job ends" if limit_s < math.inf else ""
                job.print_line(f"clcomm: {self._report(waited_s)}{then}")

    def _report(self, waited_s: float) -> str:
        return f"rank {lookout.rank()} has not ended {waited_s:.1f} s after its program: it waits for {remains()}"

    def _end_job(self, waited_s: float) -> None:
        self._end_by_force(job.TIMED_OUT)
        job.print_line(f"clcomm: {self._report(waited_s)}; the limit is {self.limits.timeout_s:g} s, the job ends")
        job.abort(job.TIMED_OUT)


def remains() -> str:
    """Return what keeps this process: its threads that are no daemons, else the exit handler that is running."""
    main = threading.main_thread()
    threads = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if threads:
        listed = (f"{thread.name!r}{_at(thread.ident)}" for thread in threads)
        return f"thread {', '.join(listed)}, which is no daemon"
    return f"an exit handler{_at(main.ident)}"


def _at(identifier: int | None) -> str:
    place = "" if identifier is None else place_of_thread(identifier)
    return f" at {place}" if place else ""
