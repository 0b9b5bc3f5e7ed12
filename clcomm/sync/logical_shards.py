"""The same bits at any number of ranks: the logical shards of a step, which the ranks share out.

Whichever rank computes a shard, it draws the same random numbers and gives the same gradient. The mean over shards is
summed in their order (see `shard_mean`), so that a run follows from seed, data and settings alone. The idea of workers
that stay the same while machines come and go is that of EasyScale (Li et al., SC 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.host import require_memory
from clcomm.comm.communicator import Communicator
from clcomm.comm.transport.reduction import in_sequence, prepared_reduction, reduce_in_rank_order
from clcomm.sync.agreement import CHECKS
from clcomm.sync.bucket_plan import GRADIENTS
from clcomm.sync.divergence import raise_non_finite
from clcomm.sync.shared_space import SharedSpace

#: The label under which the Communicator's stats count losses and other figures.
METRICS = "metrics"


@dataclass(frozen=True)
class LogicalShards:
    """How the ranks share out the logical shards of a step: in order, as evenly as possible unless dealt otherwise.

    Attributes:
        count: of all ranks together, the same in every run that is to have the same bits.
        rank, ranks: whose they are.
        is_divided: whether any rank has several, or ranks are on several hosts, where the order of a plain all-reduce
            is another.
        firsts: each rank's first shard, and `count` at the end.
    """

    count: int
    rank: int
    ranks: int
    is_divided: bool
    firsts: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.count)

    @classmethod
    def of(cls, comm: Communicator, count: int) -> LogicalShards:
        """Return those of a Communicator's ranks; ArgumentError unless each rank gets one."""
        if isinstance(count, bool) or not isinstance(count, int) or count < comm.size:
            ranks = f"{comm.size} rank{'s' * (comm.size > 1)}"
            raise ArgumentError(f"shards: expected a whole number from {comm.size} up, for {ranks}, got {count!r}")
        return cls.even(count, comm.rank, comm.size, count > comm.size or comm.hosts > 1)

    @classmethod
    def even(cls, count: int, rank: int, ranks: int, is_divided: bool) -> LogicalShards:
        """Return shards that are dealt as evenly as possible."""
        return cls(count, rank, ranks, is_divided, tuple(each * count // ranks for each in range(ranks + 1)))

    def dealt(self, counts: Sequence[int]) -> LogicalShards:
        """Return the same shards where each rank has so many; ArgumentError unless each has one and all are dealt."""
        whole = all(isinstance(each, (int, np.integer)) and each >= 1 for each in counts)
        if not whole or len(counts) != self.ranks or sum(counts) != self.count:
            expected = f"{self.ranks} whole numbers from 1 up that add up to {self.count}"
            raise ArgumentError(f"deal: expected {expected}, got {list(counts)}")
        return replace(self, firsts=(0, *accumulate(map(int, counts))))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many shards each rank has."""
        return tuple(len(self.of_rank(rank)) for rank in range(self.ranks))

    def of_rank(self, rank: int) -> range:
        """Return the numbers of a rank's shards."""
        return range(*self.firsts[rank : rank + 2])

    @property
    def own(self) -> range:
        """The numbers of this rank's shards."""
        return self.of_rank(self.rank)

    def total(self, comm: Communicator, own: Mapping[int, Sequence[float] | np.ndarray], width: int) -> np.ndarray:
        """Return the sum, in the shards' order, of `width` numbers that each shard has, float64; collective.

        own: those of this rank's shards; a shard that is left out has zeros.
        """
        numbers = np.zeros((self.count, width))
        for shard, row in own.items():
            numbers[shard] = row
        everyone = comm.all_reduce(numbers, label=METRICS)  # to each row the other ranks add zeros
        total = np.zeros(width)
        for row in everyone:
            total += row
        return total


# --- The mean of logical shards' gradients: a sum in the shards' order, whichever ranks computed them. ---


class ShardMean:
    """Keeps the gradients of a rank's shards apart, and averages those of all ranks.

    Each element is (((shard 0 + shard 1) + shard 2) + ...) / shards. Rank 0's shards are the first of the sum, so that
    one row holds their sum so far; every other shard has a row of its own, in common memory where there is some.
    Each rank reduces a part of all rows.

    Args:
        comm: the ranks.
        space: the model's.
        shards: how the ranks share them out.
        check_finite: whether `run` raises NonFiniteError on every rank where the mean holds NaN or Inf.

    Raises ArgumentError, on every rank, for parameters of several dtypes.
    """

    def __init__(self, comm: Communicator, space: SharedSpace, shards: LogicalShards, check_finite: bool = False):
        dtypes = sorted({str(place.dtype) for place in space.layout.ranges})
        if len(dtypes) > 1:
            raise ArgumentError(f"shards: expected a model with parameters of one dtype, got {', '.join(dtypes)}")
        self._comm, self._space, self._checks = comm, space, check_finite
        self._dtype = np.dtype(dtypes[0])
        self._all = Bucket(0, space.layout.ranges, 0, space.layout.span)
        self._mean = space.padded.reduced.view(self._dtype)
        self._gather = comm.all_gather_in_place_init(self._mean, label=GRADIENTS)
        self._memory = np.empty(0, np.uint8)  # of the rows, where ranks have it in common
        self.deal(shards)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What is reduced at a time: all gradients."""
        return (self._all,)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has of the shards' gradients, of common memory its part."""
        return self._nbytes

    @property
    def rows(self) -> list[np.ndarray]:
        """What this rank has put into the sum, uint8 arrays as long as the model's gradients; rank 0's is their sum."""
        return [row.view(np.uint8)[: self._space.layout.span] for row in self._rows]

    def deal(self, shards: LogicalShards) -> None:
        """Average shards that the ranks share out otherwise, from the next step on; collective."""
        self._shards = shards
        counts = [1, *shards.counts[1:]]
        self._firsts = [sum(counts[:rank]) for rank in range(shards.ranks + 1)]
        self._rows, self._reduce_part = self._prepared(sum(counts))

    def keep(self, shard: int) -> None:
        """Take the model's gradients as those of a shard; the model has none afterwards."""
        adapter, grads = self._space.adapter, self._space.arrays.grads
        moves = adapter.moves_in_place()
        if moves is None:
            adapter.pull_gradients(self._all)
        else:
            moves[0]()
        own = grads.view(self._dtype)
        index = shard - self._shards.own.start
        row = self._rows[0 if self._comm.rank == 0 else index][: own.size]
        if self._comm.rank == 0 and index:
            with np.errstate(all="ignore"):  # `check_finite` looks at the mean
                np.add(row, own, out=row)
        else:
            np.copyto(row, own)
        adapter.drop_gradients()

    def run(self) -> None:
        """Average all shards' gradients into the model; collective."""
        self.reduce()
        if self._checks and not np.isfinite(self._space.arrays.reduced.view(self._dtype)).all():
            self._raise_non_finite()
        moves = self._space.adapter.moves_in_place()
        if moves is None:
            self._space.adapter.push_gradients(self._all)
        else:
            moves[1]()

    def reduce(self) -> None:
        """Average the rows: the part of `run` in which ranks communicate."""
        whole = in_sequence([self._reduce_part, *[self._gather] * (self._comm.size > 1)])
        self._comm.run_as_all_reduce(whole, label=GRADIENTS, nbytes=self._space.layout.nbytes)

    def reduce_part(self) -> None:
        """Average this rank's part alone, one of as many equal ones as ranks, in `space.padded.reduced`; collective."""
        self._reduce_part()

    def own_sum(self) -> np.ndarray:
        """Return the sum of what this rank has put in, uint8 as long as the model's gradients."""
        with np.errstate(all="ignore"):
            own = np.add.reduce(self._rows, axis=0)[: self._space.arrays.grads.size // self._dtype.itemsize]
        return np.ascontiguousarray(own).view(np.uint8)

    def again(self, shift: int) -> np.ndarray:
        """Return the mean summed again, uint8, each rank's part by the rank `shift` before it; collective."""
        comm, part = self._comm, self._mean.size // self._comm.size
        parts, out = np.empty((self._firsts[-1], part), self._dtype), np.empty(part, self._dtype)
        _Exchange(comm, np.asarray(self._rows), parts, self._firsts, shift).run()
        reduce_in_rank_order(list(parts), out, "mean", self._shards.count)
        whole = np.roll(comm.all_gather(out, label=CHECKS).reshape(-1), shift * part)
        return whole.view(np.uint8)[: self._space.layout.span]

    def _prepared(self, rows: int) -> tuple[np.ndarray, Callable[[], None]]:
        """Return this rank's rows and what averages its part of all; collective."""
        comm, mean, fold = self._comm, self._mean, self._space.adapter.fold
        block = mean[comm.rank * (mean.size // comm.size) :][: mean.size // comm.size]
        if comm.size == 1:
            row = np.zeros((1, mean.size), self._dtype)
            self._nbytes = row.nbytes
            return row, prepared_reduction(list(row), mean, "mean", self._shards.count, fold)
        require_memory("shards", self._shards.count, rows * mean.nbytes, 1)
        if self._memory.nbytes < rows * mean.nbytes:  # with fewer shards on rank 0 than before
            self._memory = comm.allocate_common(rows * mean.nbytes)
        memory = self._memory[: rows * mean.nbytes].view(self._dtype).reshape(rows, mean.size)
        own = slice(*self._firsts[comm.rank : comm.rank + 2])
        if comm.is_common(memory):
            self._nbytes = self._memory.nbytes // comm.size
            scatter = comm.reduce_scatter_init(
                memory, "mean", out=block, count=self._shards.count, label=GRADIENTS, nbytes=mean.nbytes
            )
            return memory[own], scatter
        self._memory = np.empty(0, np.uint8)
        parts = np.empty((rows, block.size), self._dtype)
        fold_parts = prepared_reduction(list(parts), block, "mean", self._shards.count, fold)
        kept = np.zeros((own.stop - own.start, mean.size), self._dtype)
        self._nbytes = kept.nbytes + parts.nbytes
        exchange = _Exchange(comm, kept, parts, self._firsts)
        return kept, in_sequence([exchange.run, fold_parts])

    def _raise_non_finite(self) -> None:
        layout, reduced = self._space.layout, self._space.arrays.reduced
        raise_non_finite(self._comm, layout, layout.ranges, self.own_sum(), reduced)


class _Exchange:
    """Sends each rank its part of this rank's rows.

    Args:
        comm: the ranks.
        rows: this rank's.
        parts: receives this rank's part of all ranks' rows.
        firsts: the index of each rank's first row in `parts`, and their number at the end.
        shift: each rank gets the part of the rank so many after it.
    """

    def __init__(self, comm: Communicator, rows: np.ndarray, parts: np.ndarray, firsts: list[int], shift: int = 0):
        self._comm, self._rows = comm, rows
        size = parts.shape[1]
        begins = [(rank + shift) % comm.size * size for rank in range(comm.size)]
        self._cuts = [slice(begin, begin + size) for begin in begins]
        self._receives = [parts[firsts[rank] : firsts[rank + 1]].reshape(-1) for rank in range(comm.size)]

    def run(self) -> None:
        sends = [np.ascontiguousarray(self._rows[:, cut]).reshape(-1) for cut in self._cuts]
        self._comm.all_to_all(sends, self._receives, label=GRADIENTS)
