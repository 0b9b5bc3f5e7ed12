"""Operations that a program starts and completes later: a queue, which every rank works through in the same order.

Ranks may wait for their handles in any order and at any time. An operation runs when it, or a later one, is waited for,
or when a blocking one comes: always in the order in which they were started, and all ranks start the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from clcomm.errors import ArgumentError
from clcomm.horovod.lost_ranks import raising_internal_errors


class Handle:
    """A started operation; `poll` and `synchronize` take it."""

    def __init__(self, work: Callable[[], Any]):
        self._work: Callable[[], Any] | None = work
        self._result: Any = None
        self._error: Exception | None = None
        self._takes_first = False

    def __call__(self) -> Any:
        """Return `synchronize` of it: Horovod's handle of a sparse all-reduce is a function."""
        return synchronize(self)

    def take_first(self) -> None:
        """Let `result` return the first of the results."""
        self._takes_first = True

    @property
    def is_done(self) -> bool:
        """Whether it has run."""
        return self._work is None

    def run(self) -> None:
        """Run it; an error is kept for the one who waits."""
        work, self._work = self._work, None
        assert work is not None
        try:
            with raising_internal_errors():
                self._result = work()
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        """Return the result, or raise the error; both once."""
        result, error = self._result, self._error
        self._result = self._error = None
        if error is not None:
            raise error
        return result[0] if self._takes_first and result is not None else result


_queue: deque[Handle] = deque()


def start(work: Callable[[], Any]) -> Handle:
    """Put an operation into the queue."""
    handle = Handle(work)
    _queue.append(handle)
    return handle


def complete_started() -> None:
    """Run all operations of the queue."""
    while _queue:
        _queue.popleft().run()


def forget_started() -> None:
    """Drop all operations: the ranks that they were for are gone."""
    _queue.clear()


def poll(handle: Handle) -> bool:
    """Return True: the operation, and those started before it, are complete now; blocks for the other ranks."""
    _require_handle(handle)
    _run_until(handle)
    return True


def synchronize(handle: Handle | None) -> Any:
    """Complete an operation and return its result; None for a handle that was synchronized before."""
    if handle is None:
        return None
    _require_handle(handle)
    _run_until(handle)
    return handle.result()


def _run_until(handle: Handle) -> None:
    while not handle.is_done:
        if not _queue:
            raise ArgumentError("handle: expected one of this Communicator, got one whose ranks were lost")
        _queue.popleft().run()


def _require_handle(handle: object) -> None:
    if not isinstance(handle, Handle):
        raise ArgumentError(f"handle: expected what an asynchronous call returned, got {type(handle).__name__}")
