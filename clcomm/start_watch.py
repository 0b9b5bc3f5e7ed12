"""Watches ranks on their way to a Communicator, when there is no board yet to tell who is missing."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import signal
import threading

from clcomm import exits, job
from clcomm.limits import Limits
from clcomm.transport import mpi

#: Ranks may start so far apart without a word: imports from a network's disk take their time.
START_S = 30.0
#: By how much the alarm comes after the thread that can explain itself.
ALARM_MARGIN_S = 2.0


class StartWatch:
    """Watches the creation of a Communicator: a context manager.

    While MPI starts, mpi4py lets no thread work; then SIGALRM ends a rank whose others don't come, with its traceback.
    """

    def __init__(self, limits: Limits):
        warning_s = max(limits.stall_warning_s, START_S)
        self._timers = [
            threading.Timer(limit_s, act, (f"clcomm: rank {mpi.launched_rank()} has waited {limit_s:g} s for the other "
                                           f"ranks to create their Communicator",))
            for limit_s, act in ((warning_s, job.print_line), (limits.timeout_s, self._end_job))
            if limit_s < math.inf and mpi.launched_ranks() > 1
        ]  # fmt: skip
        starts = mpi.launched_ranks() > 1 and limits.timeout_s < math.inf and not mpi.is_running()
        is_ours = starts and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        self._alarm_s = limits.timeout_s + ALARM_MARGIN_S if is_ours else 0.0

    def __enter__(self) -> None:
        if self._alarm_s:
            with contextlib.suppress(ValueError, OSError, AttributeError):  # a stderr that is no file
                faulthandler.register(signal.SIGALRM, all_threads=False, chain=True)
            signal.setitimer(signal.ITIMER_REAL, self._alarm_s)
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def __exit__(self, *error: object) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._alarm_s:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)

    def _end_job(self, said: str) -> None:
        exits.end_by_force_later(job.TIMED_OUT)
        job.print_line(f"{said}; the job ends")
        job.abort(job.TIMED_OUT)
