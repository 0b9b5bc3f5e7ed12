"""The watchdog of a Communicator's creation, when no status page exists yet from which missing ranks could be named."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import signal
import threading

from clcomm.base.host.launcher import launched_rank_in_words
from clcomm.comm.transport import mpi_runtime
from clcomm.comm.watch import endings, exit_monitor
from clcomm.comm.watch.forced_end import end_by_force_later
from clcomm.comm.watch.job import Limits

#: Ranks may start this long after each other without a warning: imports from a network file system are slow.
START_S = 30.0


#: Delay of the alarm after the timer, which comes first because its message is clearer.
ALARM_MARGIN_S = 2.0


class StartWatch:
    """Watches the creation of a Communicator: a context manager.

    While MPI starts, mpi4py holds the GIL and no thread runs; SIGALRM then ends a waiting rank, with its traceback.
    """

    def __init__(self, limits: Limits):
        warning_s, rank = max(limits.stall_warning_s, START_S), launched_rank_in_words()
        self._timers = [
            threading.Timer(limit_s, act, (f"clcomm: rank {rank} has waited {limit_s:g} s for the other ranks to "
                                           "create their Communicator",))
            for limit_s, act in ((warning_s, endings.print_line), (limits.timeout_s, self._end_job))
            if limit_s < math.inf and mpi_runtime.launched_ranks() > 1
        ]  # fmt: skip
        starts = mpi_runtime.launched_ranks() > 1 and limits.timeout_s < math.inf and not mpi_runtime.is_running()
        is_ours = starts and exit_monitor.wants_hooks() and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        self._alarm_s = limits.timeout_s + ALARM_MARGIN_S if is_ours else 0.0

    def __enter__(self) -> None:
        if self._alarm_s:
            with contextlib.suppress(ValueError, OSError, AttributeError):  # stderr is not a file
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

    def _end_job(self, message: str) -> None:
        end_by_force_later(endings.TIMED_OUT)
        endings.print_line(f"{message}; the job ends")
        endings.abort(endings.TIMED_OUT)
