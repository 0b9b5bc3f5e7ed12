"""The interface of all transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.comm.transport.pending import Pending
from clcomm.comm.transport.rendezvous import DifferentOperations


class BlockingCollectives(ABC):
    """Collectives on one-dimensional, contiguous arrays of one dtype that every rank gets a result of.

    Every rank calls the same operations in the same order with equal lengths and dtypes. `source` is read, `out`
    is written, and both may be the same array where a method allows it. Arguments are not validated here. `op` is a key
    of `reduction.FOLDS`.
    """

    name: str

    @abstractmethod
    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce `source` over the ranks into `out` on every rank; they may be the same array."""

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        """Return a function that does this all-reduce on the same memory at each call; collective.

        A `FusedReduction` is one that a kernel of each rank does.
        """
        return partial(self.all_reduce, source, out, op)

    @abstractmethod
    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Copy the root's `array` into that of every other rank."""

    @abstractmethod
    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        """Put rank r's `source` at block r of `out`, on every rank."""

    @abstractmethod
    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce block r of `source` over the ranks into `out` of rank r."""


class Transport(BlockingCollectives):
    """All collectives, in the background too, between the ranks of a Communicator."""

    rank: int
    world_size: int

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        """Start an all-reduce; the caller must not touch `source` and `out` before the Pending's wait() returns."""

    def prepare_start(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], Pending]:
        """Return a function that starts this all-reduce on the same memory in the background; collective."""
        return partial(self.start_all_reduce, source, out, op)

    def start_all_gather(self, source: np.ndarray, out: np.ndarray) -> Pending:
        """Start an all-gather; the caller must not touch `source` and `out` before the Pending's wait() returns."""
        raise TypeError(f"transport {self.name!r} gathers in the foreground only")

    def start_gather_rows(self, source: np.ndarray, rows: list[np.ndarray]) -> Pending:
        """Start to append each rank's `source` to `rows`, in rank order; bytes, of any length on each rank."""
        raise TypeError(f"transport {self.name!r} gathers in the foreground only")

    @abstractmethod
    def all_to_all(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        """Send array r of `sends` to rank r, and receive array r of `receives` from it; lengths may differ."""

    def close(self) -> None:
        """Free the transport's memory and communicators; collective."""

    def revoke(self) -> None:
        """Revoke the transport's communicators, locally: ranks that wait in it get MPI's error (ERR_REVOKED)."""


def require_aligned(*arrays: np.ndarray) -> None:
    """Raise ArgumentError for a misaligned array; call it only after all ranks have compared their arrays."""
    for array in arrays:
        if not array.flags.aligned:
            raise misaligned(array.dtype)


def misaligned(dtype: np.dtype | None) -> ArgumentError:
    """Return the error for a misaligned range."""
    return ArgumentError(
        f"array, out: expected to start at a multiple of {dtype}'s size, got memory that does not; "
        f"use a slice of whole elements, or a copy"
    )


# --- Ranks compare the arrays that they bring to one operation: lengths and dtypes. ---

#: NumPy's dtypes by their numbers, and a bound of those of other packages' dtypes, which NumPy counts from 256.
_DTYPES: dict[int, np.dtype] = {np.dtype(code).num: np.dtype(code) for code in np.typecodes["All"]}
_DTYPE_NUMBERS = 1 << 12


def places_elsewhere(*arrays: np.ndarray) -> list[int]:
    """Return the `places` of arrays outside shared memory."""
    return [number for array in arrays for number in (-1, 0, array.nbytes, array.dtype.num)]


def require_alike(everyone: np.ndarray, arrays: int) -> None:
    """Raise the same MismatchError on all ranks if their tags, or the `places` after them, differ.

    Args:
        everyone: (ranks, 1 + 4 * arrays), one row from each rank.
        arrays: the number of arrays of each rank.
    """
    kinds = everyone[:, 1:].reshape(len(everyone), arrays, 4)[:, :, 2:]
    if not ((kinds[:, :, 1] >= 0) & (kinds[:, :, 1] < _DTYPE_NUMBERS)).all():
        raise DifferentOperations  # a rank in a blocking collective has described no array
    if (kinds != kinds[0]).any():
        raise mismatch(kinds[:, 0].tolist())
    if (everyone[:, 0] != everyone[0, 0]).any():
        raise DifferentOperations


def mismatch(kinds: list[list[int]]) -> MismatchError:
    """Return the error for arrays that differ, from (nbytes, dtype) on each rank."""
    sides: dict[str, list[str]] = {}
    for rank, (nbytes, number) in enumerate(kinds):
        dtype = _DTYPES.get(number)
        # The dtype number of texts, records and bfloat16 does not give the size of an element.
        if dtype is not None and dtype.itemsize:
            text = f"{nbytes // dtype.itemsize:,} {dtype}"
        else:
            text = f"{nbytes:,} bytes of dtype {f'number {number}' if dtype is None else dtype.name}"
        sides.setdefault(text, []).append(str(rank))
    listed = ", ".join(f"{text} on rank {' and '.join(ranks)}" for text, ranks in sides.items())
    return MismatchError(f"array: expected the same length and dtype on every rank, got {listed}")
