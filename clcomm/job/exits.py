"""Hooks for the end of a rank's process outside of `run(main)`, so that no other rank is left waiting for it.

docs/robustness.md lists the hooks and their reasons. CLCOMM_HOOKS=off installs none.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from time import perf_counter
from types import TracebackType
from typing import Any, ClassVar

from clcomm import variables
from clcomm.errors import ClcommError
from clcomm.job import background, endings, exit_monitor, restarts, termination_signals
from clcomm.job.last_resort import end_by_force_later
from clcomm.job.shutdown_watchdog import ShutdownWatchdog
from clcomm.job.termination_signals import SignalHandlers
from clcomm.transport import mpi_failures

#: How long a rank whose program has ended checks for ranks that wait for it.
LOOK_BACK_S = 4.0


class _Process:
    """This process's hooks and Communicators. `pid`: the rank's process; 0 without hooks."""

    pid = 0
    excepthook = sys.excepthook
    threading_excepthook = threading.excepthook
    was_open = False
    is_looking_back = False
    hooks_forks = False
    communicators: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    latest: Any = None  # a reference keeps it alive: main(), which may own it, returns before this rank looks back
    signals: SignalHandlers | None = None
    shutdown_watchdog: ShutdownWatchdog | None = None


def hook_exits() -> None:
    """Hook this process's exits, once; the program's own hooks stay in place."""
    if _Process.pid or not exit_monitor.wants_hooks():
        return
    _Process.pid = os.getpid()
    restarts.note_started()
    _Process.excepthook = sys.excepthook
    sys.excepthook = _excepthook
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _threading_excepthook
    mpi_failures.take_over_finalize()
    atexit.register(_at_exit)
    exit_monitor.watch_start()


def hook_errors() -> None:
    """Print a program's own mistakes as one line in a process that is no rank of several, too."""
    if exit_monitor.wants_hooks() and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, ClcommError) and not variables.seems_on("CLCOMM_TRACEBACK"):
        endings.print_line(f"clcomm: {error}")
    else:
        sys.__excepthook__(kind, error, trace)


def opened(communicator: Any) -> None:
    """Register an open Communicator of several ranks: from now on SIGTERM and Ctrl-C end the job cleanly."""
    hook_exits()
    if not _Process.pid:
        return
    _Process.communicators.add(communicator)
    _Process.latest = communicator
    if not _Process.was_open:
        _Process.was_open = True
        mpi_failures.call_before_finalize(_mpi_finalized)
    if _Process.signals is None:
        _Process.signals = SignalHandlers.installed(_collectives_begun)
    if _Process.signals is not None and not _Process.hooks_forks:
        _Process.hooks_forks = True
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
    if _Process.shutdown_watchdog is None:
        _Process.shutdown_watchdog = ShutdownWatchdog(communicator.limits, _activity, end_by_force_later)
    _Process.shutdown_watchdog.limits = communicator.limits


def finalized(communicator: object) -> None:
    """Deregister a closed Communicator; the last one restores the former signal handlers."""
    _Process.communicators.discard(communicator)
    if _Process.latest is communicator:
        _Process.latest = None
    if not _Process.communicators and _Process.signals is not None:
        _Process.signals.restore()
        _Process.signals = None


def _mpi_finalized() -> None:
    """Note that the program calls MPI.Finalize(): no rank can wait for this process any more."""
    exit_monitor.note_finalized()
    restarts.note_completed()


def _collectives_begun() -> int:
    return 0 if _Process.latest is None else _Process.latest.collectives_begun


def _activity() -> int | None:
    """Return the number of collectives this rank has begun; None while it is in one or looks back."""
    communicators = list(_Process.communicators)
    if _Process.is_looking_back or any(communicator.current for communicator in communicators):
        return None
    return sum(int(communicator._sequence) for communicator in communicators)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # Python then exits with code 1 through the ordinary exit handlers, including MPI's.
    if os.getpid() == _Process.pid:
        end_by_force_later(endings.FAILURE)
        endings.fail(error)
    else:
        _Process.excepthook(kind, error, trace)


def _threading_excepthook(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value
    if os.getpid() != _Process.pid or error is None or isinstance(error, SystemExit) or endings.is_reported():
        _Process.threading_excepthook(arguments)
        return
    os._exit(endings.fail(error))  # the main thread may be waiting for this thread's work


def _at_exit() -> None:
    if os.getpid() != _Process.pid:
        return  # a forked child leaves MPI to its parent
    exit_monitor.note_leaving()
    if not endings.is_reported():
        _leave_job()
    mpi_failures.finalize_after_python()


def _leave_job() -> None:
    """End the job if SIGTERM ended this program or other ranks wait for it."""
    signals = _Process.signals
    if signals is not None and signals.has_terminated():
        error = termination_signals.terminated()
        end_by_force_later(endings.TERMINATED)
        endings.fail(error)
        return
    _Process.is_looking_back = True
    try:
        background.finish()
        left = list(_Process.communicators)
        for communicator in left:  # all before the first look_back, whose order differs between ranks
            communicator.leave_program()
        deadline = perf_counter() + LOOK_BACK_S
        reasons = [communicator.look_back(deadline) for communicator in left]
    except BaseException as error:
        end_by_force_later(endings.FAILURE)
        endings.fail(error)
        return
    finally:
        _Process.is_looking_back = False
    if any(reasons):
        end_by_force_later(endings.FAILURE)
        endings.end(endings.FAILURE, next(filter(None, reasons)))
    else:
        restarts.note_completed()


# A forked child has a copy of the signal handlers and shares the pipe that wakes the rank's thread: without these
# hooks a SIGTERM to a child, as multiprocessing sends it, would end the job.


def _before_fork() -> None:
    if _Process.signals is not None:
        _Process.signals.hold_back()


def _after_fork() -> None:
    if _Process.signals is not None:
        _Process.signals.release()


def _in_child() -> None:
    if _Process.signals is not None:
        _Process.signals.restore_in_child()
        _Process.signals = None
