"""The ranks of each host, in the order of their lowest ranks, and how far the clocks of hosts are apart."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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


# --- Clock offsets between processes, from the quickest of several ping-pongs with rank 0. ---
# Cristian's method (F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989): a request sent
# at t0 and answered with T at t1 means that T was read between the two, so the clocks differ by T - (t0 + t1) / 2, plus
# or minus half of the round trip.

#: Tag of the messages.
_TAG = 7
#: Ping-pongs of each rank, of which the quickest counts.
ROUND_TRIPS = 32


class ClockOffset(NamedTuple):
    """Rank 0's perf_counter_ns() minus a rank's own, to within `uncertainty_ns`."""

    offset_ns: int = 0
    uncertainty_ns: int = 0


def measure_offset(comm: Intracomm, round_trips: int = ROUND_TRIPS) -> ClockOffset:
    """Return this rank's clock offset to rank 0; collective.

    Args:
        comm: an mpi4py communicator; None: a world of one.
        round_trips: the number of ping-pongs.
    """
    if comm is None or comm.Get_size() == 1:
        return ClockOffset()
    if comm.Get_rank() > 0:
        return _ask(comm, round_trips)
    for rank in range(1, comm.Get_size()):
        _answer(comm, rank, round_trips)
    return ClockOffset()


def _ask(comm: Intracomm, round_trips: int) -> ClockOffset:
    mine, theirs = np.zeros(1, np.int64), np.zeros(1, np.int64)
    comm.Recv(mine, 0, _TAG)  # rank 0 measures with one rank at a time
    best = None
    for _ in range(round_trips):
        began_ns = time.perf_counter_ns()
        comm.Sendrecv(mine, 0, _TAG, theirs, 0, _TAG)
        ended_ns = time.perf_counter_ns()
        answer = ClockOffset(int(theirs[0]) - (began_ns + ended_ns) // 2, (ended_ns - began_ns + 1) // 2)
        if best is None or answer.uncertainty_ns < best.uncertainty_ns:
            best = answer
    assert best is not None
    return best


def _answer(comm: Intracomm, rank: int, round_trips: int) -> None:
    now, theirs = np.zeros(1, np.int64), np.zeros(1, np.int64)
    comm.Send(now, rank, _TAG)
    for _ in range(round_trips):
        comm.Recv(theirs, rank, _TAG)
        now[0] = time.perf_counter_ns()
        comm.Send(now, rank, _TAG)
