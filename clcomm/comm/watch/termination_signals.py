"""SIGTERM and Ctrl-C while a Communicator is open: they raise in the main thread, or another thread ends the job."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from clcomm.comm.watch import endings

#: How long a signal may wait for the main thread, which may be in an MPI call, before another thread ends the job.
REACTION_S = 1.0
#: Signals within this time are one: a service manager and mpiexec each send one to a rank.
REPEATED_S = 2.0
#: The signals that end a program.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def terminated() -> endings.Exit:
    """Return the exception that SIGTERM raises in the main thread."""
    return endings.Exit(endings.TERMINATED, "ended by SIGTERM")


def ignore_repeated() -> None:
    """Ignore further signals in exit handlers: Python's end would give them their default action."""
    if threading.current_thread() is threading.main_thread():
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _program_s(number: int) -> Any:
    """Return a signal's handler; under one that ignores repetitions, the program's."""
    handler = signal.getsignal(number)
    owner = getattr(handler, "__self__", None)
    return owner._before[number] if isinstance(owner, SignalHandlers) else handler


class SignalHandlers:
    """Handlers of SIGTERM and SIGINT that raise in the main thread; a thread ends the job if that does not react.

    While a rank waits in MPI's C code, no Python handler runs. Python's C handler writes the signal's number to a pipe
    all the same, which wakes the thread.

    Args:
        progress: returns a number that grows while the program runs.
    """

    def __init__(self, progress: Callable[[], int]) -> None:
        self._progress = progress
        self._terminated_at: int | None = None
        self._reacted = threading.Event()
        self._raised_s = -math.inf
        self._held = threading.local()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before: dict[int, Any] = {number: _program_s(number) for number in ENDING_SIGNALS}
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._interrupt)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._wait_for_signals, name="clcomm-signals", daemon=True).start()

    @classmethod
    def installed(cls, progress: Callable[[], int]) -> SignalHandlers | None:
        """Return handlers in place of Python's own; None if the program has others, or outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return None
        found = tuple(map(_program_s, ENDING_SIGNALS))
        if found != (signal.SIG_DFL, signal.default_int_handler):
            return None
        wakeup = signal.set_wakeup_fd(-1)
        if wakeup != -1:
            signal.set_wakeup_fd(wakeup)
            return None
        return cls(progress)

    def has_terminated(self) -> bool:
        """Return whether SIGTERM has raised its exception and the program has made no progress since."""
        return self._terminated_at is not None and self._terminated_at == self._progress()

    def restore(self) -> None:
        """Restore the former handlers, unless the program has replaced these; but let a signal not be repeated."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(-1)
        for number, handler in ((signal.SIGTERM, self._terminate), (signal.SIGINT, self._interrupt)):
            if signal.getsignal(number) == handler:
                signal.signal(number, self._repeat if self._is_repeated() else self._before[number])
        os.close(self._writer)  # ends the thread

    # --- forks ---

    def hold_back(self) -> None:
        """Block the signals in this thread: a child that got one before `restore_in_child` would end the job."""
        self._held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)

    def release(self) -> None:
        """Undo `hold_back`."""
        mask, self._held.mask = getattr(self._held, "mask", None), None
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def restore_in_child(self) -> None:
        """Restore the handlers in a forked child, where the thread does not exist, and release the signals."""
        self.restore()
        os.close(self._reader)
        self.release()

    # --- handlers ---

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._is_first(number):
            self._terminated_at = self._progress()
            raise terminated()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_first(number):
            raise KeyboardInterrupt

    def _repeat(self, number: int, frame: FrameType | None) -> None:
        """Take a signal after the Communicator was closed as one more of those that ended the program, or as new."""
        if not self._is_repeated():
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)

    def _is_first(self, number: int) -> bool:
        """Return whether to raise for a signal: not while an earlier signal's end is under way."""
        self._reacted.set()
        if self._is_repeated():
            return False
        self._raised_s = time.monotonic()
        endings.note_signal(number)
        return True

    def _is_repeated(self) -> bool:
        return endings.is_reported() or time.monotonic() - self._raised_s < REPEATED_S

    def _wait_for_signals(self) -> None:
        while True:
            numbers = os.read(self._reader, 1)
            if not numbers:
                os.close(self._reader)
                return
            if numbers[0] not in ENDING_SIGNALS:
                continue
            if not self._reacted.wait(REACTION_S) and not endings.is_reported():
                error = terminated() if numbers[0] == signal.SIGTERM else KeyboardInterrupt()
                code = endings.fail(error)
                endings.abort(code)  # the other ranks would wait in MPI_Finalize for this rank, which exits without it
                os._exit(code)
            self._reacted.clear()
