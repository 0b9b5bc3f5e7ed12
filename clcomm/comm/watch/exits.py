"""Hooks for the end of a rank's process outside of `run(main)`, so that no other rank is left waiting for it.

docs/robustness.md lists the hooks and their reasons. CLCOMM_HOOKS=off installs none.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from time import perf_counter
from types import TracebackType

from clcomm.base.errors import ClcommError
from clcomm.base.host import variables
from clcomm.comm.transport import mpi_failures, mpi_runtime
from clcomm.comm.watch import endings, exit_monitor, termination_signals
from clcomm.comm.watch.exit_monitor_process import FINALIZED, LEAVING
from clcomm.comm.watch.forced_end import end_by_force_later
from clcomm.comm.watch.job import Hooks, Job, Limits, OpenCommunicator, this_job
from clcomm.comm.watch.termination_signals import SignalHandlers
from clcomm.comm.watch.worlds import ThisWorld

#: How long a rank whose program has ended checks for ranks that wait for it.
LOOK_BACK_S = 4.0


def hook_job() -> Hooks:
    """Return the hooks of this process's job, which the first call installs."""
    job = this_job()
    if job.hooks is None:
        job.hooks = ExitHooks(job)
        if variables.text("CLCOMM_CHAOS") and not ThisWorld().waits:
            from clcomm.comm.watch.chaos import arm  # here, as few jobs want faults

            arm(job)
    return job.hooks


class ExitHooks:
    """This process's hooks and open Communicators.

    A process that a launcher started as one of several gets all hooks at once. Any other prints its own mistakes as one
    line, until it has a Communicator of several ranks.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pid = 0  # the rank's process; 0 without hooks
        self._excepthook, self._threading_excepthook = sys.excepthook, threading.excepthook
        self._communicators: weakref.WeakSet[OpenCommunicator] = weakref.WeakSet()
        #: Kept alive: main(), which may own it, returns before this rank looks back.
        self._latest: OpenCommunicator | None = None
        self._was_open = self._is_looking_back = self._hooks_forks = False
        self._signals: SignalHandlers | None = None
        self._shutdown_watchdog: ShutdownWatchdog | None = None
        if mpi_runtime.is_one_of_several():
            self._hook_exits()
        elif exit_monitor.wants_hooks() and sys.excepthook is sys.__excepthook__:
            sys.excepthook = _print_error

    def opened(self, communicator: OpenCommunicator) -> None:
        """Register an open Communicator of several ranks: from now on SIGTERM and Ctrl-C end the job cleanly."""
        self._hook_exits()
        if not self._pid:
            return
        self._communicators.add(communicator)
        self._latest = communicator
        if not self._was_open:
            self._was_open = True
            mpi_failures.call_before_finalize(self._mpi_finalized)
        if self._signals is None:
            self._signals = SignalHandlers.installed(self._collectives_begun)
        if self._signals is not None and not self._hooks_forks:
            self._hooks_forks = True
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._in_child
            )
        if self._shutdown_watchdog is None:
            self._shutdown_watchdog = ShutdownWatchdog(communicator.lifetime.limits, self._activity, end_by_force_later)
        self._shutdown_watchdog.limits = communicator.lifetime.limits

    def closed(self, communicator: OpenCommunicator) -> None:
        """Deregister a closed Communicator; the last one restores the former signal handlers."""
        self._communicators.discard(communicator)
        if self._latest is communicator:
            self._latest = None
        if not self._communicators and self._signals is not None:
            self._signals.restore()
            self._signals = None

    def _hook_exits(self) -> None:
        """Hook this process's exits, once; the program's own hooks stay in place."""
        if self._pid or not exit_monitor.wants_hooks():
            return
        self._pid = os.getpid()
        self._job.progress.note_started()
        self._excepthook = sys.excepthook
        sys.excepthook = self._fail
        if threading.excepthook is threading.__excepthook__:
            threading.excepthook = self._fail_in_thread
        mpi_failures.take_over_finalize()
        processes = sys.modules.get("multiprocessing.process")
        if processes is None or processes.parent_process() is None:
            atexit.register(self._at_exit)
        else:  # one of multiprocessing's, which end without Python's exit handlers
            from multiprocessing.util import Finalize

            Finalize(None, self._at_exit_of_child, exitpriority=-1)
        exit_monitor.watch_start(self._job.record)

    def _mpi_finalized(self) -> None:
        """Note that the program calls MPI.Finalize(): no rank can wait for this process any more."""
        self._job.record.note(FINALIZED)
        self._job.progress.note_completed()

    def _collectives_begun(self) -> int:
        return 0 if self._latest is None else self._latest.lifetime.collectives_begun

    def _activity(self) -> int | None:
        """Return the number of collectives this rank has begun; None while it is in one or looks back."""
        communicators = list(self._communicators)
        if self._is_looking_back or any(communicator.current for communicator in communicators):
            return None
        return sum(int(communicator.sequence) for communicator in communicators)

    # --- the end ---

    def _fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Python then exits with code 1 through the ordinary exit handlers, including MPI's.
        if os.getpid() == self._pid:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            end_by_force_later(endings.INTERRUPTED if is_interrupt else endings.FAILURE)
            code = endings.fail(error)
            if is_interrupt:
                raise SystemExit(code)  # else Python would end itself by SIGINT, which MPICH's launcher returns as 2
        else:
            self._excepthook(kind, error, trace)

    def _fail_in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if os.getpid() != self._pid or error is None or isinstance(error, SystemExit) or self._job.is_reported:
            self._threading_excepthook(arguments)
            return
        os._exit(endings.fail(error))  # the main thread may be waiting for this thread's work

    def _at_exit_of_child(self) -> None:
        """End as at Python's end, but leave a failure to the program that has started this process.

        If that does not end the other ranks, the exit monitor does.
        """
        if sys.exc_info()[1] is None:
            self._at_exit()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child leaves MPI to its parent
        self._job.record.note(LEAVING)
        if not self._job.is_reported:
            self._leave_job()
        if self._job.is_reported or self._job.is_signalled:
            termination_signals.ignore_repeated()
        mpi_failures.finalize_after_python()

    def _leave_job(self) -> None:
        """End the job if SIGTERM ended this program or other ranks wait for it."""
        if self._signals is not None and self._signals.has_terminated():
            error = termination_signals.terminated()
            end_by_force_later(endings.TERMINATED)
            endings.fail(error)
            return
        self._is_looking_back = True
        try:
            self._job.finish_queues()
            left = list(self._communicators)
            for communicator in left:  # all before the first look_back, whose order differs between ranks
                communicator.lifetime.leave_program()
            deadline = perf_counter() + LOOK_BACK_S
            reasons = [communicator.lifetime.look_back(deadline) for communicator in left]
        except BaseException as error:
            end_by_force_later(endings.FAILURE)
            endings.fail(error)
            return
        finally:
            self._is_looking_back = False
        if any(reasons):
            end_by_force_later(endings.FAILURE)
            endings.end(endings.FAILURE, next(filter(None, reasons)))
        else:
            self._job.progress.note_completed()

    # --- forks ---
    # A forked child has a copy of the signal handlers and shares the pipe that wakes the rank's thread: without these
    # hooks a SIGTERM to a child, as multiprocessing sends it, would end the job.

    def _before_fork(self) -> None:
        if self._signals is not None:
            self._signals.hold_back()

    def _after_fork(self) -> None:
        if self._signals is not None:
            self._signals.release()

    def _in_child(self) -> None:
        if self._signals is not None:
            self._signals.restore_in_child()
            self._signals = None


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ClcommError) and not variables.seems_on("CLCOMM_TRACEBACK"):
        endings.print_line(f"clcomm: {error}")
    else:
        sys.__excepthook__(kind, error, trace)


# --- The shutdown watchdog: a thread that reports what blocks a rank's exit after its program, and ends a hung job. ---
# A non-daemon thread or an exit handler can block the exit forever; the other ranks then wait in MPI_Finalize, where no
# Python code runs that could report it. So the rank itself reports it, and ends the job at the time-out.

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
    from clcomm.comm.watch.stall_message import place_of_thread  # here, as it needs NumPy

    place = "" if identifier is None else place_of_thread(identifier)
    return f" at {place}" if place else ""
