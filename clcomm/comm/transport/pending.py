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

import numpy as np

from clcomm.base.errors import ClcommError
from clcomm.comm.transport.futex import POLLS_BETWEEN_PROGRESS
from clcomm.comm.transport.rendezvous import DifferentOperations, HostRendezvous

#: Tests of a message before a rank that waits for it gives its core away, and the pauses then.
_TESTS, _PAUSE_S = 2000, 2e-4

#: (begin, end) by time.perf_counter().
Span = tuple[float, float]


class Request(Protocol):
    """The part of an MPI request that a transport needs."""

    def Wait(self) -> object: ...
    def Test(self) -> object: ...


class Guard(Protocol):
    """Watches an operation as long as not all ranks have started it."""

    def look(self) -> None:
        """Raise DifferentOperations, on every rank, if ranks wait in different operations; it then blocks for them."""

    def settle(self) -> Exception:
        """Return the error of ranks in different operations, after ending all that are unfinished; collective."""


class _StartedQueues(threading.local):
    """A thread's queues of unfinished operations, by id, and messages; they stay alive, as MPI uses their arrays."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[Pending]] = {}
        self.messages: list[Callable[[], bool]] = []


_started = _StartedQueues()


def advance_with_others(is_done: Callable[[], bool]) -> None:
    """Have a waiting rank call `is_done` of a message that this thread has started, until it returns True."""
    _started.messages.append(is_done)


def advance_started() -> bool:
    """Advance this thread's operations and messages without blocking; return whether any are left."""
    queues = _started.queues
    if _started.messages:
        _started.messages = [is_done for is_done in _started.messages if not is_done()]
    for key, queue in tuple(queues.items()) if queues else ():
        while queue and queue[0]._advance(block=False):
            pass
        if not queue:
            queues.pop(key, None)
    return bool(queues or _started.messages)


def complete_started() -> None:
    """Complete this thread's operations; an error is raised by the handle of the operation that failed."""
    while advance_started() and _started.queues:
        os.sched_yield()


def wait_until(is_done: Callable[[], bool], seconds: float = 0.0) -> bool:
    """Block until `is_done()`, and advance this thread's operations; return False after `seconds`, if above 0."""
    tests, began_s = 0, time.perf_counter()
    while not is_done():
        advance_started()
        tests += 1
        time.sleep(0 if tests < _TESTS else _PAUSE_S)
        if 0 < seconds < time.perf_counter() - began_s:
            return False
    return True


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
        take_back: undoes a start; None: MPI cannot, and the other ranks have to let its request complete.
    """

    def __init__(
        self,
        queue: deque[Pending],
        first: Request | None,
        *phases: Callable[[], Request | None],
        meets: bool = False,
        take_back: Callable[[], object] | None = None,
    ):
        self._queue, self._request = queue, first
        self._phases, self._next = phases, 0
        self._error: Exception | None = None
        self._is_moving = self._is_looking = False
        self._take_back = take_back
        self._guard: Guard | None = None
        self._polls = 0
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

    def guard_with(self, guard: Guard) -> None:
        """Have ranks that wait for different operations find that out."""
        self._guard = guard

    def wait(self) -> None:
        """Block until this rank has the result; raises the operation's error if it failed."""
        if not self.finished:
            queues = _started.queues
            queues[id(self._queue)] = self._queue  # another thread may have started it
            while not self.finished:
                if len(queues) == 1 and not _started.messages:
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
        if self._is_looking:
            return False  # called by a wait within `look`
        try:
            while self._has_come(block):
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
        except DifferentOperations as error:
            self._end_all(error)
        except Exception as error:
            self.fail(error)  # raised by its own handle, not by that of a later operation
        except BaseException:
            if self._is_moving:  # Ctrl-C during a sum: repeating it would count some ranks twice
                self.fail(ClcommError("all-reduce: it was interrupted while data moved; its result is lost"))
            raise
        else:
            self._finish()
        return True

    def _has_come(self, block: bool) -> bool:
        """Return whether the request is complete; until all ranks have started this, look at what they do instead."""
        if self._next or self._guard is None:
            return _complete(self._request, block)
        if block:
            _complete_and_look(self._request, self._look)
        is_complete = block or _complete(self._request, block=False)
        if is_complete or self._polls % POLLS_BETWEEN_PROGRESS == 0:
            self._look()
        self._polls += 1
        return is_complete

    def _look(self) -> None:
        assert self._guard is not None
        self._is_looking = True
        try:
            self._guard.look()
        finally:
            self._is_looking = False

    def _end_all(self, error: Exception) -> None:
        """End the queue's operations, as ranks have come to different ones."""
        self._is_looking = True  # a wait within `settle` advances none of them
        if self._guard is not None:
            try:
                error = self._guard.settle()
            except Exception as another:
                error = another
        if not self.finished:
            self.fail(error)

    def take_back(self) -> None:
        """Undo the start of this operation, which ranks have not all started, before any rank can start another."""
        if self._take_back is not None:
            self._take_back()
            self._request = None

    def withdraw(self, error: Exception) -> None:
        """End this operation, the queue's head, with an error; MPI has been given what its request needs."""
        if self._request is not None:
            self._request.Wait()
        self.fail(error)

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


def _complete_and_look(request: Request | None, look: Callable[[], object]) -> None:
    """Complete a request, and call `look` now and then: it raises if ranks will not come."""
    wait_and_look = getattr(request, "wait_and_look", None)
    if wait_and_look is not None:  # not one of MPI's: it can sleep meanwhile
        wait_and_look(look)
        return
    polls = 0
    while not _complete(request, block=False):
        if polls % POLLS_BETWEEN_PROGRESS == 0:
            look()
        polls += 1
        os.sched_yield()


# --- The order in which the ranks of a host start operations in the background. ---
# An operation in the background needs all ranks. Ranks that start theirs in different orders, or that wait for
# different ones in a blocking call, would wait for each other. So each rank notes, in shared memory, what it starts
# under which number, and a rank that waits looks at the others' notes, and at whether one of them is in a blocking
# call.

#: How many of its latest starts a rank's notes hold; in front of them nothing is found.
_KEPT = 256
#: A note is one word, which is written at once: a mark, the number of the operation, and bits of its tag.
_MARK, _NUMBER_BITS, _TAG_BITS = 1 << 62, 38, 24


class StartOrder:
    """This rank's notes, and the other ranks'.

    Args:
        memory: `nbytes(ranks)` zeroed bytes, shared by all ranks.
        rendezvous: the ranks' rendezvous.
    """

    def __init__(self, memory: np.ndarray, rendezvous: HostRendezvous):
        self._notes = [row.data for row in memory.view(np.int64).reshape(-1, _KEPT)]
        self._rendezvous, self._own = rendezvous, self._notes[rendezvous.rank]

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the number of bytes that the notes of `ranks` ranks need."""
        return ranks * _KEPT * 8

    def note(self, number: int, tag: int) -> None:
        """Note that this rank starts its operation of this number, before it does."""
        self._own[number % _KEPT] = _word(number, tag)

    def differs(self, number: int, tag: int) -> bool:
        """Return whether a rank has come to another operation in place of this one, which not all have started.

        One has if it noted another one under this number, or if it has not come to this number and is in a blocking
        call to which this rank has not come.
        """
        word = _word(number, tag)
        if self.is_left_for(self._rendezvous, number):
            return True
        found = (notes[number % _KEPT] for notes in self._notes)
        return any(note != word and note >> _TAG_BITS == word >> _TAG_BITS for note in found)

    def is_left_for(self, rendezvous: HostRendezvous, number: int) -> bool:
        """Return whether a rank waits at a rendezvous of these ranks, and has not come to this number before.

        That is one to which this rank has not come. It may be another Communicator's.
        """
        counters = rendezvous.counters.tolist()  # read before the notes, which a rank writes before it goes on
        met, mark = counters[rendezvous.rank], _word(number, 0) >> _TAG_BITS
        pairs = zip(counters, self._notes, strict=True)
        return any(counter > met and notes[number % _KEPT] >> _TAG_BITS < mark for counter, notes in pairs)


def _word(number: int, tag: int) -> int:
    return _MARK | number % (1 << _NUMBER_BITS) << _TAG_BITS | tag % (1 << _TAG_BITS)
