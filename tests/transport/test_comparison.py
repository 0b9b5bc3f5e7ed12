"""The rendezvous through MPI: ranks compare numbers with the same result, and on one host get each other's arrival."""

from __future__ import annotations

import random

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.comm.transport.comparisons import Comparisons
from clcomm.comm.transport.mpi_communicators import comparison_between_hosts

TURNS = 50


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("between_hosts", [False, True])
def test_ranks_learn_together_who_differs_and_when_each_came(auto, between_hosts):
    on_host = Comparisons(auto.comm, auto.comm).alike
    alike, rng = comparison_between_hosts(auto.comm) if between_hosts else on_host, random.Random(3)
    for _ in range(TURNS):
        arrivals = [rng.randrange(1 << 62) for _ in range(auto.size)]
        number, odd = rng.randrange(-(1 << 62), 1 << 62), rng.randrange(2 * auto.size)
        same, came = alike(number + (auto.rank == odd), arrivals[auto.rank])
        assert same == (odd >= auto.size)
        assert came == (None if between_hosts else arrivals)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_every_reduction_says_who_came_last(transport):
    comm = Communicator(transport=transport)
    for _ in range(TURNS):
        comm.all_reduce(np.ones(100, np.float32), label="gradients")
    found = comm.merged_stats().as_dict()["stragglers"]
    assert sum(row["last"] for row in found) == pytest.approx(TURNS, abs=comm.size)
    assert {row["rank"] for row in found} <= set(range(comm.size)) and all(row["late_s"] >= 0 for row in found)
    own = sum(count for count, *_ in comm.stats.late.values())
    assert own == TURNS
    comm.finalize()
