"""The interface every transport offers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from clcomm.errors import ArgumentError

#: (begin, end) by time.perf_counter().
Span = tuple[float, float]


class Request(Protocol):
    """The part of an MPI request that a transport needs."""

    def Wait(self) -> object: ...
    def Test(self) -> object: ...


class Transport(ABC):
    """Collectives on one-dimensional, contiguous arrays of one dtype.

    Every rank calls the same operations in the same order with equal lengths and dtypes. `source` is read, `out`
    is written, and both may be the same array where a method says so. Arguments are taken as checked.
    """

    name: str
    rank: int
    world_size: int

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce `source` over the ranks into `out` on every rank; they may be the same array."""

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        """Return what does this all-reduce, on the same memory, each time it is called; collective."""
        return lambda: self.all_reduce(source, out, op)

    @abstractmethod
    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        """Begin an all-reduce; `source` and `out` stay untouched by the caller until it is waited for."""

    def prepare_start(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], Pending]:
        """Return what begins this all-reduce, on the same memory, each time it is called; collective."""
        return lambda: self.start_all_reduce(source, out, op)

    @abstractmethod
    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Copy root's `array` into every other rank's."""

    @abstractmethod
    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        """Put rank r's `source` at block r of `out`, on every rank."""

    @abstractmethod
    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce block r of `source` over the ranks into `out` of rank r."""

    @abstractmethod
    def gather(self, source: np.ndarray, out: np.ndarray | None, root: int) -> None:
        """Put rank r's `source` at block r of root's `out`; the others pass None."""

    @abstractmethod
    def scatter(self, source: np.ndarray | None, out: np.ndarray, root: int) -> None:
        """Put block r of root's `source` into rank r's `out`; the others pass None as `source`."""

    def close(self) -> None:  # noqa: B027 - a transport with nothing to free needs none
        """Free what the transport holds; collective."""

    def revoke(self) -> None:  # noqa: B027 - nor one that reaches nobody
        """Give the transport up without the others: ranks that wait in it get MPI's error (ERR_REVOKED)."""


class Pending:
    """A collective in phases: a first request, then as often as need be work of our own that may start another.

    Later phases have communicators of their own and start in the order of the first ones, so ranks may wait for their
    handles in any order: `queue` holds all unfinished ones, whichever transport has them, and only its head moves on.
    Were there a queue for each transport, two ranks could wait for each other's later phases.

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
        self._meets_from_s = time.perf_counter() if meets else None
        self.finished = False
        #: When it was seen to be finished, by time.perf_counter().
        self.finished_s = 0.0
        #: When it waited for other ranks; None where that is not told from moving data.
        self.waits: list[Span] | None = None
        #: When each rank came (perf_counter_ns), where one clock tells.
        self.arrivals: list[int] | None = None
        queue.append(self)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def wait(self) -> None:
        """Return when the result is there, on this rank; raise what made it fail."""
        while not self.finished:
            self._queue[0]._advance(block=True)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Make progress without blocking and say whether the result is there."""
        while self._queue and not self.finished and self._queue[0]._advance(block=False):
            pass
        return self.finished

    def _advance(self, block: bool) -> bool:
        try:
            while _complete(self._request, block):
                if self._meets_from_s is not None:
                    self.waits, self._meets_from_s = [(self._meets_from_s, time.perf_counter())], None
                if self._next == len(self._phases):
                    break
                self._next += 1
                self._request = self._phases[self._next - 1]()
            else:
                return False
        except Exception as error:
            self._error = error  # for whoever waits for this one, not for another that is behind it
        self.finished, self.finished_s = True, time.perf_counter()
        self._phases, self._request = (), None
        self._queue.popleft()
        return True


def require_aligned(*arrays: np.ndarray) -> None:
    """Raise ArgumentError for an array that starts between two elements; after all ranks have compared that."""
    for array in arrays:
        if not array.flags.aligned:
            raise misaligned(array.dtype)


def misaligned(dtype: np.dtype | None) -> ArgumentError:
    """Return the error for a range that starts between two elements."""
    return ArgumentError(
        f"array, out: expected to start at a multiple of {dtype}'s size, got memory that does not; "
        f"use a slice of whole elements, or a copy"
    )


def _complete(request: Request | None, block: bool) -> bool:
    if request is None:
        return True
    if block:
        request.Wait()
        return True
    return bool(request.Test())
