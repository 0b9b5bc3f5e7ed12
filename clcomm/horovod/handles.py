"""Handles of operations that a program starts and completes later.

Ranks may poll their handles and wait for them in any order and at any time, but all ranks start the same operations in
the same order. A started operation advances in every call that waits for other ranks, and in `poll`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.comm.tensors.background import Started
from clcomm.horovod import joined
from clcomm.horovod.operations import raising_internal_errors

#: Those that a rank which has joined may end, as long as the program keeps them, by their order.
_started: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def run_ended() -> None:
    """Run what was started, in the order of the starts, after a rank that has joined has ended all of it."""
    for _, handle in sorted(_started.items()):
        handle.run_ended()


class Handle:
    """A started operation; `poll` and `synchronize` take it.

    Args:
        started: the operation.
        run: runs it and waits, where a rank that has joined has ended it; None: nothing does.
    """

    def __init__(self, started: Started[Any], run: Callable[[], Any] | None = None):
        self._started: Started[Any] | None = started
        self._run, self._result = run, None
        self._error: ArgumentError | None = None
        if run is not None:
            _started[next(_numbers)] = self

    def __call__(self) -> Any:
        """Return `synchronize` of it: Horovod's handle of a sparse all-reduce is a function."""
        return synchronize(self)

    @raising_internal_errors()
    def is_done(self) -> bool:
        """Advance it without blocking, and return whether it is complete."""
        if self._started is None:
            return True
        if not self._started.done():
            return False
        if not self._started.failed:  # else the one who waits gets the error
            self._finish()
        return True

    @raising_internal_errors()
    def result(self) -> Any:
        """Wait for it and return its result, or raise its error; both once."""
        if self._started is not None:
            self._finish()
        result, error, self._result, self._error = self._result, self._error, None, None
        if error is not None:
            raise error
        return result

    def _finish(self) -> None:
        assert self._started is not None
        try:
            self._result = self._started.wait()
        except ArgumentError as error:
            if self._run is None or not joined.is_notice(error):
                raise
            run_ended()
        finally:
            self._started = None

    def run_ended(self) -> None:
        """Run the operation, if its result is not there yet; `result` raises its error."""
        if self._started is not None and self._run is not None:
            self._started = None
            try:
                self._result = self._run()
            except ArgumentError as error:
                self._error = error


def poll(handle: Handle) -> bool:
    """Return whether an operation is complete on this rank; never blocks.

    It becomes True once all ranks have started the operation and call `poll`, `synchronize` or a blocking operation.
    """
    return _checked(handle).is_done()


def synchronize(handle: Handle | None) -> Any:
    """Complete an operation and return its result; None for a handle that was synchronized before."""
    return None if handle is None else _checked(handle).result()


def _checked(handle: object) -> Handle:
    if not isinstance(handle, Handle):
        raise ArgumentError(f"handle: expected what an asynchronous call returned, got {type(handle).__name__}")
    return handle
