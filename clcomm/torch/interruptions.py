"""Time-outs of collectives, raised as exceptions as by PyTorch's other backends.

A rank that waits runs Python in turns with its polls, so an exception can be raised in its thread from outside
(PyThreadState_SetAsyncExc). One that MPI itself blocks cannot be reached: then the job ends, as with a Communicator.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from clcomm.base.errors import ClcommError

#: Raises an exception of a class in a thread, by its identifier; and takes back one that has not arrived.
_FUNCTION = "PyThreadState_SetAsyncExc", ctypes.pythonapi


_raise_in = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(_FUNCTION)


_take_back = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(_FUNCTION)


class GroupTimeoutError(ClcommError, RuntimeError):
    """A collective took longer than its group's timeout; the group cannot be used any more.

    Where the program does not catch it, the job ends as after a Communicator's time-out.
    """

    exit_code = 124


class _Interrupted(BaseException):
    """Raised in a waiting thread; not an Exception, which code on the way might handle."""


class Interruptions:
    """The threads of this rank in a group's collectives, and the error raised in them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._error: GroupTimeoutError | None = None

    def run(self, move: Callable[[], object]) -> None:
        """Call a function that waits for other ranks; raises GroupTimeoutError once the group has timed out."""
        own = threading.get_ident()
        try:
            with self._lock:
                self._require_usable()
                self._threads.add(own)
            try:
                move()
            finally:
                self._leave(own)
        except _Interrupted:
            self._leave(own)  # again, where the exception arrived within it
            assert self._error is not None
            raise self._error from None

    def interrupt(self, text: str, limit_s: float, end_job: Callable[[], None]) -> bool:
        """Raise an error in all of these threads, once; return False if there are none, or it was done before.

        Args:
            text: this rank's operation, and the ranks that it waits for.
            end_job: called if the program does not catch the error.
        """
        with self._lock:
            if self._error is not None or not self._threads:
                return False
            self._error = GroupTimeoutError(f"{text}; the group's timeout of {limit_s:g} s is over")
            self._error.end_job = end_job
            for thread in self._threads:
                _raise_in(thread, _Interrupted)
            return True

    def _require_usable(self) -> None:
        if self._error is not None:
            raise GroupTimeoutError(
                "group: expected one without a time-out, but one of its collectives has timed out; "
                "call destroy_process_group, then init_process_group or new_group"
            )

    def _leave(self, thread: int) -> None:
        with self._lock:
            self._threads.discard(thread)
            # Otherwise nothing was raised; and before Python 3.13 this call would leave the interpreter looking for an
            # exception at every call and jump from then on, by which a profiled program never goes on.
            if self._error is not None:
                _take_back(thread, None)
