"""Hosts are ordered by their lowest ranks, for any order of the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.comm.transport.hosts import Hosts
from clcomm.comm.transport.reduction import prepared_reduction_by_hosts
from tests.transport.references import drawn, folded, same_bits


@pytest.mark.parametrize(
    ("leaders", "ranks", "fewest", "even", "nested"),
    [
        ([0], ((0,),), 1, True, False),
        ([0, 0, 0], ((0, 1, 2),), 3, True, False),
        ([0, 1, 2], ((0,), (1,), (2,)), 1, True, False),
        ([0, 0, 2, 2], ((0, 1), (2, 3)), 2, True, True),
        ([0, 1, 0, 1], ((0, 2), (1, 3)), 2, True, True),
        ([0, 1, 1, 0, 4], ((0, 3), (1, 2), (4,)), 1, False, True),
    ],
)
def test_hosts_from_each_ranks_lowest_neighbour(leaders, ranks, fewest, even, nested):
    hosts = Hosts.of_leaders(leaders)
    assert hosts.ranks == ranks
    assert (len(hosts), hosts.fewest, hosts.even, hosts.nested) == (len(ranks), fewest, even, nested)
    assert [ranks[hosts.host_of(rank)][0] for rank in range(len(leaders))] == leaders


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_a_fold_by_hosts_adds_the_hosts_sums(op):
    hosts = ((0, 3), (1, 2), (4,))
    rows = [drawn(rank, 40_000, "float32").copy() for rank in range(5)]
    expected = folded(rows, op, hosts)
    prepared_reduction_by_hosts(rows, rows[0], op, hosts)()  # may end in a row
    assert same_bits(rows[0], expected)


def test_the_order_shows_in_the_bits():
    rows = [np.array([value], np.float32) for value in (1e8, 1.0, 1.0, -1e8)]
    assert folded(rows, "sum")[0] == 0
    assert folded(rows, "sum", ((0, 1), (2, 3)))[0] == 0
    assert folded(rows, "sum", ((0, 3), (1, 2)))[0] == 2
