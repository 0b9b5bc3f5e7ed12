"""The collectives that `clcomm bench` measures: their memory, one call, and a check against the ranks' formula."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError

#: Each rank's values repeat after so many elements; a prime, so that a piece at a wrong place is seen.
PERIOD = 97
_CLEARED = 126  # no rank's value: an element that nobody wrote is seen


def rank_values(rank: int, dtype: np.dtype) -> np.ndarray:
    """Return one period of what a rank puts in: (7 i + 31 rank) mod 97, which every dtype holds exactly."""
    return ((7 * np.arange(PERIOD) + 31 * rank) % PERIOD).astype(dtype)


def expected_reduction(ranks: int, op: str, dtype: np.dtype) -> np.ndarray:
    """Return one period of the ranks' values reduced in rank order: the bits that clcomm promises."""
    fold = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}[op]
    total = rank_values(0, dtype)
    with np.errstate(all="ignore"):
        for rank in range(1, ranks):
            total = fold(total, rank_values(rank, dtype))
        return (total / ranks).astype(dtype) if op == "mean" else total


def wrong_elements(array: np.ndarray, period: np.ndarray, first: int = 0) -> int:
    """Return how many elements differ from `period`, repeated; the array's first element is `first` in that."""
    rolled, flat = np.roll(period, -first), array.reshape(-1)
    whole = flat.size // PERIOD * PERIOD
    in_rows = np.count_nonzero(flat[:whole].reshape(-1, PERIOD) != rolled)
    return int(in_rows + np.count_nonzero(flat[whole:] != rolled[: flat.size - whole]))


class Case(ABC):
    """One collective on one size and dtype, with its memory; creating one is collective.

    nbytes: the operation's size in nccl-tests' sense, rounded down to whole elements, of at least one a rank where
    ranks have parts of it. Memory is the Communicator's own wherever the call takes it.
    """

    operation: str
    reduces = False
    #: Whether each rank has a part of the operation's size.
    parted = False

    def __init__(self, comm: Communicator, nbytes: int, dtype: str = "float32", op: str = "sum"):
        self.comm, self.dtype, self.op = comm, np.dtype(dtype), op
        if op == "mean" and self.reduces and self.dtype.kind != "f":
            raise ArgumentError(f"--op: 'mean' needs a floating dtype, got {dtype}; use 'sum'")
        unit = comm.size if self.parted else 1
        self.count = max(1, nbytes // self.dtype.itemsize // unit) * unit
        self.nbytes = self.count * self.dtype.itemsize
        self.part = self.count // unit
        self._make()

    @abstractmethod
    def _make(self) -> None:
        """Allocate memory, fill it with this rank's values."""

    @abstractmethod
    def once(self) -> object:
        """Do it once."""

    @abstractmethod
    def check(self) -> int:
        """Do it once on fresh values and return how many elements on this rank are wrong."""

    def _allocate(self, count: int, *, common: bool = False) -> np.ndarray:
        make = self.comm.allocate_common if common else self.comm.allocate
        return make(count * self.dtype.itemsize).view(self.dtype)

    def _fill(self, array: np.ndarray, first: int = 0) -> None:
        array[...] = np.resize(np.roll(rank_values(self.comm.rank, self.dtype), -first), array.size)


class AllReduce(Case):
    """Out of place, the result in memory that ranks of a host have in common: how the Synchronizer uses it."""

    operation, reduces = "all_reduce", True

    def _make(self) -> None:
        self.source = self._allocate(self.count)
        self.out = self._allocate(self.count, common=True)
        self._fill(self.source)

    def once(self) -> object:
        return self.comm.all_reduce(self.source, self.op, out=self.out)

    def check(self) -> int:
        self._fill(self.source)
        self.out[...] = _CLEARED
        self.once()
        return wrong_elements(self.out, expected_reduction(self.comm.size, self.op, self.dtype))


class PreparedAllReduce(AllReduce):
    """The same, prepared once, as the Synchronizer does for each bucket."""

    operation = "all_reduce_init"

    def _make(self) -> None:
        super()._make()
        self._run = self.comm.all_reduce_init(self.source, self.op, out=self.out)

    def once(self) -> object:
        return self._run()


class Broadcast(Case):
    """In place, from rank 0."""

    operation = "broadcast"

    def _make(self) -> None:
        self.array = self._allocate(self.count)
        self._fill(self.array)

    def once(self) -> object:
        return self.comm.broadcast(self.array)

    def check(self) -> int:
        self._fill(self.array)
        self.once()
        return wrong_elements(self.array, rank_values(0, self.dtype))


class AllGather(Case):
    """Into a new array, as the Communicator returns it."""

    operation, parted = "all_gather", True

    def _make(self) -> None:
        self.source = self._allocate(self.part)
        self._fill(self.source)

    def once(self) -> object:
        return self.comm.all_gather(self.source)

    def check(self) -> int:
        return _wrong_rows(self.comm.all_gather(self.source), self.dtype)


class ReduceScatter(Case):
    """Into a new array, as the Communicator returns it."""

    operation, reduces, parted = "reduce_scatter", True, True

    def _make(self) -> None:
        self.source = self._allocate(self.count)
        self._fill(self.source)

    def once(self) -> object:
        return self.comm.reduce_scatter(self.source, self.op)

    def check(self) -> int:
        block = self.comm.reduce_scatter(self.source, self.op)
        expected = expected_reduction(self.comm.size, self.op, self.dtype)
        return wrong_elements(block, expected, self.comm.rank * self.part)


class Gather(AllGather):
    """To rank 0, into a new array; the agreement on shapes that comes before is part of it."""

    operation = "gather"

    def once(self) -> object:
        return self.comm.gather(self.source)

    def check(self) -> int:
        rows = self.comm.gather(self.source)
        return 0 if rows is None else _wrong_rows(rows, self.dtype)


class Scatter(Case):
    """From rank 0, into a new array; telling shape and dtype is part of it."""

    operation, parted = "scatter", True

    def _make(self) -> None:
        whole = self._allocate(self.count)  # on every rank, as that is a collective; only rank 0's is used
        self._fill(whole)
        self.source = whole.reshape(self.comm.size, -1) if self.comm.rank == 0 else None

    def once(self) -> object:
        return self.comm.scatter(self.source)

    def check(self) -> int:
        part = self.comm.scatter(self.source)
        return wrong_elements(part, rank_values(0, self.dtype), self.comm.rank * self.part)


def _wrong_rows(rows: Sequence[np.ndarray] | np.ndarray, dtype: np.dtype) -> int:
    return sum(wrong_elements(row, rank_values(rank, dtype)) for rank, row in enumerate(rows))


CASES: dict[str, type[Case]] = {
    case.operation: case
    for case in (AllReduce, PreparedAllReduce, Broadcast, AllGather, ReduceScatter, Gather, Scatter)
}
