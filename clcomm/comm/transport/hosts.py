"""The ranks of each host; hosts are ordered by their lowest ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from clcomm.comm.transport.mpi_runtime import Intracomm


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job as tuples of ranks, each in rank order."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of_leaders(cls, leaders: Sequence[int]) -> Hosts:
        """Return the hosts; leaders: for each rank, the lowest rank on its host."""
        found = sorted(set(leaders))
        return cls(tuple(tuple(rank for rank, own in enumerate(leaders) if own == leader) for leader in found))

    @classmethod
    def of_names(cls, names: Sequence[Hashable]) -> Hosts:
        """Return the hosts; names: for each rank, its host's."""
        return cls.of_leaders([names.index(name) for name in names])

    @classmethod
    def of(cls, comm: Intracomm, host: Intracomm) -> Hosts:
        """Return the hosts of a job; collective.

        Args:
            comm: an mpi4py communicator of all ranks.
            host: one of this host's ranks, in rank order.
        """
        return cls.of_leaders(comm.allgather(host.bcast(comm.Get_rank(), 0)))

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def nested(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them."""
        return len(self) > 1 and any(len(ranks) > 1 for ranks in self.ranks)

    @property
    def fewest(self) -> int:
        """The smallest number of ranks on a host."""
        return min(map(len, self.ranks))

    @property
    def even(self) -> bool:
        """Whether every host has the same number of ranks."""
        return self.fewest == max(map(len, self.ranks))

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return next(index for index, ranks in enumerate(self.ranks) if rank in ranks)
