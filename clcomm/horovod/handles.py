"""Handles of operations that a program starts and completes later.

Ranks may poll their handles and wait for them in any order and at any time, but all ranks start the same operations in
the same order. A started operation advances in every call that waits for other ranks, and in `poll`.
"""

from __future__ import annotations

from typing import Any

from clcomm.errors import ArgumentError
from clcomm.horovod.lost_ranks import raising_internal_errors
from clcomm.tensors.started import Started


class Handle:
    """A started operation; `poll` and `synchronize` take it."""

    def __init__(self, started: Started[Any]):
        self._started: Started[Any] | None = started
        self._result: Any = None

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
        result, self._result = self._result, None
        return result

    def _finish(self) -> None:
        started, self._started = self._started, None
        assert started is not None
        self._result = started.wait()


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
