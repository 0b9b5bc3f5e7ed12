"""Collectives that go on in the background: each Communicator has a queue of them, and a rank moves all of its queues.

A rank that waits for one operation, or for other ranks in a blocking collective, moves on everything that its thread
has started, on any Communicator. So no rank waits for a phase that another rank leaves undone while it waits too.
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
    """The queues that hold what a thread has started and not finished, by identity; kept until then, as MPI writes."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[Pending]] = {}


_started = _Started()


def advance_started() -> bool:
    """Move on what this thread has started, without blocking; say whether anything is left of it."""
    queues = _started.queues
    for key, queue in tuple(queues.items()) if queues else ():
        while queue and queue[0]._advance(block=False):
            pass
        if not queue:
            queues.pop(key, None)
    return bool(queues)


def complete_started() -> None:
    """Complete what this thread has started; what fails is raised by its own handle."""
    while advance_started():
        os.sched_yield()


def complete(request: Request) -> None:
    """Complete a request, and move on what this thread has started as long as that takes."""
    while advance_started():
        if request.Test():
            return
        os.sched_yield()
    request.Wait()


class Pending:
    """A collective in phases: a first request, then as often as need be work of our own that may start another.

    Later phases have communicators of their own and start in the order of the first ones, so ranks may wait for their
    handles in any order: `queue` holds all unfinished ones of a Communicator, whichever transport has them, and only
    its head moves on. Were there a queue for each transport, two ranks could wait for each other's later phases.

    What phases refer to stays until all are done: an MPI may use arrays, lengths and offsets until the request that a
    phase has returned is complete, and mpi4py does not keep those of Iallgatherv (4.1.2).

    meets: whether the first request is complete as soon as all ranks have come, before data moves.
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
        #: When it was seen to be finished, by time.perf_counter().
        self.finished_s = 0.0
        #: When it waited for other ranks; None where that is not told from moving data.
        self.waits: list[Span] | None = None
        #: When each rank came (perf_counter_ns), where one clock tells.
        self.arrivals: list[int] | None = None
        queue.append(self)
        _started.queues[id(queue)] = queue

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def wait(self) -> None:
        """Return when the result is there, on this rank; raise what made it fail."""
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
        """Make progress without blocking and say whether the result is there."""
        if not self.finished:
            _started.queues[id(self._queue)] = self._queue
            advance_started()
        return self.finished

    def _advance(self, block: bool) -> bool:
        """Do what can be done, and say whether it is finished; the queue's head only."""
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
            self.fail(error)  # raised by its own handle, not by another that is behind it
        except BaseException:
            if self._is_moving:  # Ctrl-C in the middle of a sum: to make it again would count some ranks twice
                self.fail(ClcommError("all-reduce: it was interrupted while data moved; its result is lost"))
            raise
        else:
            self._finish()
        return True

    def fail(self, error: Exception) -> None:
        """End it, the queue's head, with an error that its handle raises."""
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
