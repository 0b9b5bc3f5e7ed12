"""Collectives in the background: each Communicator has a queue of them, and a waiting rank advances all of its queues.

A rank that waits for one operation, or for other ranks in a blocking collective, advances everything that its thread
has started, on any Communicator. This prevents deadlocks between ranks that wait for each other's later phases.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from clcomm.errors import ClcommError

#: (begin, end) by time.perf_counter().
Span = tuple[float, float]


class Request(Protocol):
    """The part of an MPI request that a transport needs."""

    def Wait(self) -> object: ...
    def Test(self) -> object: ...


class _Started(threading.local):
    """A thread's queues of unfinished operations, by id; they stay alive, as MPI writes to their arrays."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[Pending]] = {}


_started = _Started()


def advance_started() -> bool:
    """Advance this thread's operations without blocking; return whether any are left."""
    queues = _started.queues
    for key, queue in tuple(queues.items()) if queues else ():
        while queue and queue[0]._advance(block=False):
            pass
        if not queue:
            queues.pop(key, None)
    return bool(queues)


def complete_started() -> None:
    """Complete this thread's operations; an error is raised by the handle of the operation that failed."""
    while advance_started():
        os.sched_yield()


def complete(request: Request) -> None:
    """Complete a request, and advance this thread's operations meanwhile."""
    while advance_started():
        if request.Test():
            return
        os.sched_yield()
    request.Wait()


class Pending:
    """A collective in phases: a first request, then functions that compute and may each return another request.

    Later phases use separate communicators and start in the order of the first requests, so ranks may wait for their
    handles in any order: `queue` holds all unfinished operations of a Communicator, over all transports, and only its
    head advances. With a queue for each transport, two ranks could wait for each other's later phases.

    All phases stay referenced until the last is complete: MPI may use arrays, lengths and offsets until the request of
    a phase is complete, and mpi4py does not keep those of Iallgatherv (4.1.2).

    Args:
        queue: the Communicator's unfinished operations, to which this one is appended.
        first: the first request; None: there is nothing to wait for.
        phases: are called in order, each when the request before it is complete.
        meets: whether the first request completes as soon as all ranks have arrived, before data moves.
    """

    def __init__(
        self,
        queue: deque[Pending],
        first: Request | None,
        *phases: Callable[[], Request | None],
        meets: bool = False,
    ):
        self._queue, self._request = queue, first
        self._phases, self._next = phases, 0
        self._error: Exception | None = None
        self._is_moving = False
        self._meets_from_s = time.perf_counter() if meets else None
        self.finished = False
        #: When the end was observed, by time.perf_counter().
        self.finished_s = 0.0
        #: When this rank waited for other ranks; None where that cannot be separated from moving data.
        self.waits: list[Span] | None = None
        #: Each rank's arrival (perf_counter_ns), where all ranks share a clock.
        self.arrivals: list[int] | None = None
        queue.append(self)
        _started.queues[id(queue)] = queue

    @property
    def failed(self) -> bool:
        """Whether the operation ended with an error."""
        return self._error is not None

    def wait(self) -> None:
        """Block until this rank has the result; raises the operation's error if it failed."""
        if not self.finished:
            queues = _started.queues
            queues[id(self._queue)] = self._queue  # another thread may have started it
            while not self.finished:
                if len(queues) == 1:
                    self._queue[0]._advance(block=True)
                elif advance_started() and not self.finished:
                    os.sched_yield()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Advance this thread's operations without blocking, and return whether this rank has the result."""
        if not self.finished:
            _started.queues[id(self._queue)] = self._queue
            advance_started()
        return self.finished

    def _advance(self, block: bool) -> bool:
        """Advance this operation, the queue's head, and return whether it is finished."""
        try:
            while _complete(self._request, block):
                if self._meets_from_s is not None:
                    self.waits, self._meets_from_s = [(self._meets_from_s, time.perf_counter())], None
                if self._next == len(self._phases):
                    break
                self._next += 1
                self._is_moving = True
                self._request = self._phases[self._next - 1]()
                self._is_moving = False
            else:
                return False
        except Exception as error:
            self.fail(error)  # raised by its own handle, not by that of a later operation
        except BaseException:
            if self._is_moving:  # Ctrl-C during a sum: repeating it would count some ranks twice
                self.fail(ClcommError("all-reduce: it was interrupted while data moved; its result is lost"))
            raise
        else:
            self._finish()
        return True

    def fail(self, error: Exception) -> None:
        """End this operation, the queue's head, with an error that its handle raises."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self.finished, self.finished_s = True, time.perf_counter()
        self._phases, self._request = (), None
        self._queue.popleft()
        if not self._queue:
            _started.queues.pop(id(self._queue), None)


def _complete(request: Request | None, block: bool) -> bool:
    if request is None:
        return True
    if block:
        request.Wait()
        return True
    return bool(request.Test())
