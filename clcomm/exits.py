"""All ways out of a rank's process that `run(main)` does not see: none of them leaves the other ranks waiting.

`watch()` hooks uncaught exceptions, in threads too, SystemExit and os._exit() in a process that a launcher started as
one of several; a Communicator also hooks SIGTERM and Ctrl-C while it is open, where nobody else has.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
import weakref
from time import perf_counter
from types import FrameType, TracebackType
from typing import Any, ClassVar

from clcomm import bounded_end, job, lookout, restarts
from clcomm.exit_code import shell_code, tell_of_the_last
from clcomm.overtime import Overtime
from clcomm.transport import mpi

#: How long a signal may wait for the main thread, which may be deep in an MPI call, until another thread ends the job.
REACTION_S = 1.0
#: Signals that come so soon after another one are the same: a service manager and mpiexec each send theirs to a rank.
REPEATED_S = 2.0
#: How long the end of a failed rank may take, where MPI does not answer.
LAST_RESORT_S = 8.0
#: How long a rank that leaves the program looks back at ranks that may need it.
LOOK_BACK_S = 4.0
#: How long before the process that kills it a thread of ours tries to end it, with the right exit code.
THREADS_LEAD_S = 1.0
#: What a process ended by a signal returns to the shell: 128 + the signal.
SIGNALLED = 128
#: The signals that ask a program to end.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Hooks:
    """What was there before us, and what this process is about to leave with."""

    pid = 0
    leave_now: Any = os._exit
    excepthook: Any = sys.excepthook
    threading_excepthook: Any = threading.excepthook
    leaving_with: job.Exit | None = None
    was_open = False
    leaves_out_mpi = False
    is_looking_back = False
    communicators: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    latest: Any = None  # kept, as it may be a variable of a main() that is over when the program looks back
    signals: _Signals | None = None
    overtime: Overtime | None = None


_Forking = threading.local()  # in a thread that forks: the signals it held back before


def watch() -> None:
    """Hook this process's ways out, once; hooks that others have set stay."""
    if _Hooks.pid:
        return
    _Hooks.pid = os.getpid()
    restarts.note_started()
    sys.excepthook = _excepthook
    tell_of_the_last(_leaves)
    os._exit = _exit_now  # type: ignore[assignment]
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _threading_excepthook
    atexit.register(_at_exit)
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)


def opened(communicator: Any) -> None:
    """Note an open Communicator of several ranks: from now on signals end the job in order."""
    watch()
    _Hooks.communicators.add(communicator)
    _Hooks.latest = communicator
    _Hooks.was_open = True
    if _Hooks.signals is None:
        _Hooks.signals = _Signals.installed()
    if mpi.tolerates_failures() and not _Hooks.leaves_out_mpi:
        _leave_out_mpi()  # MPI_Finalize waits for a rank that dies when the others are done
    if _Hooks.overtime is None:
        _Hooks.overtime = Overtime(communicator.limits, _activity, end_by_force_later)
    _Hooks.overtime.limits = communicator.limits


def _activity() -> int | None:
    """Return how many collectives this rank has begun, None while it is in one or looks back at the others."""
    communicators = list(_Hooks.communicators)
    if _Hooks.is_looking_back or any(communicator.current for communicator in communicators):
        return None
    return sum(communicator._sequence for communicator in communicators)


def finalized(communicator: Any) -> None:
    """Note that a Communicator is done with; with the last one the signals' handlers are again what they were."""
    _Hooks.communicators.discard(communicator)
    if _Hooks.latest is communicator:
        _Hooks.latest = None
    if not _Hooks.communicators and _Hooks.signals is not None:
        _Hooks.signals.restore()
        _Hooks.signals = None


def _leaves(error: SystemExit) -> None:
    """Note with what code the program ends; Python itself has written the text of one that is no number."""
    if error.code is not None:
        code = error.code if isinstance(error.code, int) else job.FAILURE
        _Hooks.leaving_with = job.Exit(int(code), getattr(error, "reason", ""))


def _exit_now(status: int) -> None:
    """Leave without exit handlers, as os._exit() does, once the other ranks of a job under way are ended."""
    may_be_awaited = _Hooks.communicators or not _Hooks.was_open
    if os.getpid() == _Hooks.pid and not job.is_reported() and (status or may_be_awaited):
        end_by_force_later(status)
        job.fail(job.Exit(status or job.FAILURE, f"left by os._exit({status})"))
    elif os.getpid() == _Hooks.pid and status == 0:
        restarts.note_completed()
        if mpi.is_finalized():
            lookout.note_leaving()  # the launcher does not take it for a failure either
    _Hooks.leave_now(shell_code(status))


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # Python then leaves with exit code 1 through the ordinary exit handlers, MPI's among them.
    if os.getpid() == _Hooks.pid:
        end_by_force_later(job.FAILURE)
        job.fail(error)
    else:
        _Hooks.excepthook(kind, error, trace)


def _threading_excepthook(arguments: Any) -> None:
    error = arguments.exc_value
    if os.getpid() != _Hooks.pid or error is None or isinstance(error, SystemExit) or job.is_reported():
        _Hooks.threading_excepthook(arguments)
        return
    _Hooks.leave_now(job.fail(error))  # the main thread may be waiting for what this thread was to do


def _before_fork() -> None:
    """Hold signals back: a child that got one before it let go of our pipe would end the job with it."""
    if _Hooks.signals is not None:
        _Forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)


def _after_fork() -> None:
    mask, _Forking.mask = getattr(_Forking, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forked() -> None:
    """Let a child's signals be its own: it has a copy of the handlers, and the very pipe that our thread reads.

    Its end is its own too.
    """
    if mpi.is_running():
        _leave_out_mpi()
    if _Hooks.signals is not None:
        _Hooks.signals.restore()
        _Hooks.signals.close_reader()
        _Hooks.signals = None
    _after_fork()


def _leave_out_mpi() -> None:
    """Let this process end without MPI_Finalize; the exit handler that does so stays the one that is called first."""
    _Hooks.leaves_out_mpi = True
    register = atexit.register

    def register_before_ours(function: Any, /, *args: Any, **named: Any) -> Any:
        register(function, *args, **named)
        atexit.unregister(_leave_without_mpi)
        register(_leave_without_mpi)
        return function

    atexit.register = register_before_ours
    register(_leave_without_mpi)


def _leave_without_mpi() -> None:
    """End this process as Python does, but for MPI_Finalize; of the exit handlers this one calls the others.

    The MPI that a forked child has a copy of is its parent's. Where ranks may die, MPI_Finalize may wait for the dead.
    """
    atexit.unregister(_leave_without_mpi)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    error = _Hooks.leaving_with
    failed = getattr(sys, "last_value", None) is not None  # Python has told of an exception that nobody caught
    _Hooks.leave_now(shell_code(int(failed) * job.FAILURE if error is None else int(error.code or 0)))


def _at_exit() -> None:
    if os.getpid() != _Hooks.pid:
        return
    lookout.note_leaving()
    if not job.is_reported():
        _leave_job()


def _leave_job() -> None:
    """Look whether other ranks wait for this one, whose program is over; end the job where they do, or it failed."""
    error = _Hooks.leaving_with
    if error is not None and error.code:
        end_by_force_later(int(error.code))
        job.fail(error)
        return
    _Hooks.is_looking_back = True
    try:
        left = list(_Hooks.communicators)
        for communicator in left:  # all, before the first look back: ranks look at them in orders of their own
            communicator.leave_program()
        deadline = perf_counter() + LOOK_BACK_S
        reasons = [communicator.look_back(deadline) for communicator in left]
    except BaseException as error:
        end_by_force_later(job.FAILURE)
        job.fail(error)
        return
    finally:
        _Hooks.is_looking_back = False
    if any(reasons):
        end_by_force_later(job.FAILURE)
        job.end(job.FAILURE, next(filter(None, reasons)))
    else:
        restarts.note_completed()


def end_by_force_later(code: int) -> None:
    """End this process in any case: its MPI may wait for ranks that never started theirs.

    A thread of ours knows the exit code, but is gone once Python has ended and MPI_Finalize waits; then it's SIGKILL.
    """
    timer = threading.Timer(LAST_RESORT_S, leave_by_force, (code,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # too late for a thread, or one too many
        timer.start()
    with contextlib.suppress(OSError):
        bounded_end.start(os.getpid(), LAST_RESORT_S + THREADS_LEAD_S)


def leave_by_force(code: int) -> None:
    """End this process, and where MPI has not started, the other ranks that the same launcher runs on this host.

    Launchers see nothing wrong in a rank that leaves before MPI has started, so a rank that has stopped would stay.
    """
    if not mpi.is_running() and mpi.launched_ranks() > 1:
        lookout.end_siblings()
    _Hooks.leave_now(shell_code(code))


class _Signals:
    """SIGTERM and SIGINT as exceptions in the main thread; a thread of ours ends the job where that one can't react.

    A rank that waits in MPI's C code runs no Python handler. The C handler's byte in a pipe wakes our thread then.
    """

    def __init__(self) -> None:
        self._reacted = threading.Event()
        self._raised_s = -math.inf
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
        signal.signal(signal.SIGTERM, self._terminated)
        signal.signal(signal.SIGINT, self._interrupted)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._look_after, name="clcomm-signals", daemon=True).start()

    @classmethod
    def installed(cls) -> _Signals | None:
        """Return handlers in place of the default ones; None where somebody has their own, or off the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return None
        ours = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        if ours != (signal.SIG_DFL, signal.default_int_handler):
            return None
        wakeup = signal.set_wakeup_fd(-1)
        if wakeup != -1:
            signal.set_wakeup_fd(wakeup)
            return None
        return cls()

    def restore(self) -> None:
        """Put the former handlers back, where ours are still in place."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(-1)
        for number, ours in ((signal.SIGTERM, self._terminated), (signal.SIGINT, self._interrupted)):
            if signal.getsignal(number) == ours:
                signal.signal(number, self._before[number])
        os.close(self._writer)  # ends the thread

    def close_reader(self) -> None:
        """Close what the thread reads, where there is none: in a child."""
        os.close(self._reader)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if self._is_first():
            raise _terminated()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._is_first():
            raise KeyboardInterrupt

    def _is_first(self) -> bool:
        """Say whether to raise for a signal: not while the end that an earlier one began goes on."""
        self._reacted.set()
        now = time.monotonic()
        if job.is_reported() or now - self._raised_s < REPEATED_S:
            return False
        self._raised_s = now
        return True

    def _look_after(self) -> None:
        while True:
            numbers = os.read(self._reader, 1)
            if not numbers:
                os.close(self._reader)
                return
            if numbers[0] not in ENDING_SIGNALS:
                continue
            if not self._reacted.wait(REACTION_S) and not job.is_reported():
                error = _terminated() if numbers[0] == signal.SIGTERM else KeyboardInterrupt()
                code = job.fail(error)
                job.abort(code)  # the others would wait in MPI_Finalize for this rank, which leaves without
                _Hooks.leave_now(code)
            self._reacted.clear()


def _terminated() -> job.Exit:
    return job.Exit(SIGNALLED + signal.SIGTERM, "ended by SIGTERM")
