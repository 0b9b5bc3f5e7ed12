"""The collectives of `clcomm bench`: each allocates its memory, makes a call and checks the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.schedules import ALGORITHMS
from clcomm.comm.communicator import Communicator

#: Each rank's values repeat after so many elements; a prime, so that misplaced elements are detected.
PERIOD = 97
#: The reductions that are measured.
OPS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}
#: No rank has this value. Results are cleared to it and timed calls move it, so that a check sees its own call alone.
_CLEARED = 126


def rank_values(rank: int, dtype: np.dtype) -> np.ndarray:
    """Return one period of a rank's input: (7 i + 31 rank) mod 97, which every dtype holds exactly."""
    return ((7 * np.arange(PERIOD) + 31 * rank) % PERIOD).astype(dtype)


def expected_reduction(ranks: int, op: str, dtype: np.dtype) -> np.ndarray:
    """Return one period of the ranks' values reduced in rank order: the bits that clcomm guarantees."""
    fold = OPS[op]
    total = rank_values(0, dtype)
    with np.errstate(all="ignore"):
        for rank in range(1, ranks):
            total = fold(total, rank_values(rank, dtype))
        return (total / ranks).astype(dtype) if op == "mean" else total


def wrong_elements(array: np.ndarray, period: np.ndarray, first: int = 0) -> int:
    """Return how many elements differ from `period`, repeated; the array starts at element `first` of it."""
    rolled, flat = np.roll(period, -first), array.reshape(-1)
    whole = flat.size // PERIOD * PERIOD
    in_rows = np.count_nonzero(flat[:whole].reshape(-1, PERIOD) != rolled)
    return int(in_rows + np.count_nonzero(flat[whole:] != rolled[: flat.size - whole]))


class Case(ABC):
    """One collective at one size and dtype, with its memory, which the Communicator allocates; creation is collective.

    `nbytes` is the operation's size as nccl-tests defines it, rounded down to whole elements: at least one, and where
    ranks have parts of it, one a rank.
    """

    operation: str
    reduces = False
    #: Whether each rank has only a part of the operation's size.
    parted = False

    def __init__(self, comm: Communicator, nbytes: int, dtype: str = "float32", op: str = "sum"):
        self.comm, self.dtype, self.op = comm, np.dtype(dtype), op
        if op == "mean" and self.reduces and self.dtype.kind != "f":
            raise ArgumentError(f"--op: 'mean' needs a floating dtype, got {dtype}; use 'sum'")
        unit = comm.size if self.parted else 1
        self.count = max(1, nbytes // self.dtype.itemsize // unit) * unit
        self.nbytes = self.count * self.dtype.itemsize
        self.part = self.count // unit
        self._allocate_arrays()

    def _allocate_arrays(self) -> None:
        self.source = self._allocate(self.part)

    @abstractmethod
    def once(self) -> object:
        """Call the collective once; return the result if it is a new array."""

    @abstractmethod
    def wrong(self, result: object) -> int:
        """Return how many of this rank's elements differ from the expected result."""

    def check(self) -> int:
        """Call the collective once on `rank_values`; return how many of this rank's elements are wrong."""
        self.source[...] = np.resize(rank_values(self.comm.rank, self.dtype), self.source.size)
        return self.wrong(self.once())

    def _allocate(self, count: int, *, common: bool = False) -> np.ndarray:
        make = self.comm.allocate_common if common else self.comm.allocate
        array = make(count * self.dtype.itemsize).view(self.dtype)
        array[...] = _CLEARED
        return array


class AllReduceCase(Case):
    """Out of place, into memory common to a host's ranks, as the Synchronizer calls it."""

    operation, reduces = "all_reduce", True

    def _allocate_arrays(self) -> None:
        super()._allocate_arrays()
        self.out = self._allocate(self.count, common=True)

    def once(self) -> object:
        return self.comm.all_reduce(self.source, self.op, out=self.out)

    def check(self) -> int:
        self.out[...] = _CLEARED
        return super().check()

    def wrong(self, result: object) -> int:
        return wrong_elements(self.out, expected_reduction(self.comm.size, self.op, self.dtype))


class PreparedAllReduceCase(AllReduceCase):
    """The same, prepared once, as the Synchronizer prepares each bucket."""

    operation = "all_reduce_init"

    def _allocate_arrays(self) -> None:
        super()._allocate_arrays()
        self._prepared = self.comm.all_reduce_init(self.source, self.op, out=self.out)

    def once(self) -> object:
        return self._prepared()


class ScheduledAllReduceCase(AllReduceCase):
    """The same by an algorithm of `clcomm.base.schedules`, with messages from rank to rank."""

    algorithm: str

    def once(self) -> object:
        return self.comm.all_reduce(self.source, self.op, out=self.out, algorithm=self.algorithm)


def _scheduled(algorithm: str) -> type[Case]:
    members = {"algorithm": algorithm, "operation": f"all_reduce_{algorithm}"}
    return type(f"{algorithm.title()}AllReduce", (ScheduledAllReduceCase,), members)


class BroadcastCase(Case):
    """In place, from rank 0."""

    operation = "broadcast"

    def once(self) -> object:
        return self.comm.broadcast(self.source)

    def wrong(self, result: object) -> int:
        return wrong_elements(self.source, rank_values(0, self.dtype))


class AllGatherCase(Case):
    """Into a new array, as the Communicator returns it."""

    operation, parted = "all_gather", True

    def once(self) -> object:
        return self.comm.all_gather(self.source)

    def wrong(self, result: Any) -> int:
        return sum(wrong_elements(row, rank_values(rank, self.dtype)) for rank, row in enumerate(result))


class GatherCase(AllGatherCase):
    """To rank 0, into a new array; comparing the ranks' shapes before it is part of the time."""

    operation = "gather"

    def once(self) -> object:
        return self.comm.gather(self.source)

    def wrong(self, result: object) -> int:
        return 0 if result is None else super().wrong(result)


class ReduceScatterCase(Case):
    """Into a new array, as the Communicator returns it."""

    operation, reduces, parted = "reduce_scatter", True, True

    def _allocate_arrays(self) -> None:
        self.source = self._allocate(self.count)

    def once(self) -> object:
        return self.comm.reduce_scatter(self.source, self.op)

    def wrong(self, result: Any) -> int:
        expected = expected_reduction(self.comm.size, self.op, self.dtype)
        return wrong_elements(result, expected, self.comm.rank * self.part)


class ScatterCase(Case):
    """From rank 0, into a new array; sending shape and dtype is part of the time."""

    operation, parted = "scatter", True

    def _allocate_arrays(self) -> None:
        self.source = self._allocate(self.count)  # a collective call, though only rank 0's is used

    def once(self) -> object:
        return self.comm.scatter(self.source.reshape(self.comm.size, -1) if self.comm.rank == 0 else None)

    def wrong(self, result: Any) -> int:
        return wrong_elements(result, rank_values(0, self.dtype), self.comm.rank * self.part)


_WITHOUT_ALGORITHM: tuple[type[Case], ...] = (
    AllReduceCase, PreparedAllReduceCase, BroadcastCase, AllGatherCase, ReduceScatterCase, GatherCase, ScatterCase,
)  # fmt: skip
CASES: dict[str, type[Case]] = {
    case.operation: case for case in (*_WITHOUT_ALGORITHM, *(_scheduled(name) for name in ALGORITHMS))
}
