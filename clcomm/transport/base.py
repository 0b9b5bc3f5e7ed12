"""The interface every transport offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from clcomm.errors import ArgumentError
from clcomm.transport.pending import Pending


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
