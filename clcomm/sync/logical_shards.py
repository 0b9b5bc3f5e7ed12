"""The same bits at any number of ranks: the logical shards of a step, which the ranks share out.

Whichever rank computes a shard, it draws the same random numbers and gives the same gradient. The mean over shards is
summed in their order (see `shard_mean`), so that a run follows from seed, data and settings alone. The idea of workers
that stay the same while machines come and go is that of EasyScale (Li et al., SC 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator

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
