"""Rounds of all-reduces on hosts whose ranks share a link, beside formulas, schedules, and a simulator's figures."""

from __future__ import annotations

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.base.schedules import schedule_of
from clcomm.comm.costs.jobs import flat_s, rounds_of
from clcomm.comm.costs.model import Cost, terms

WITHIN, LINK = Cost(1e-6, 1e-10), Cost(2e-6, 8e-11)
#: What SimGrid 3.32 gave for SMPI's rdb, rab_rdb and lr with these links, as tests/proofs/forecast.py runs it: the
#: algorithm, bytes, ranks, ranks of a host, microseconds.
SIMULATED = [
    ("doubling", 4608, 8, 1, 7.10),
    ("halving", 4608, 8, 1, 12.65),
    ("ring", 4608, 8, 1, 28.65),
    ("doubling", 4608, 8, 4, 6.40),
    ("halving", 4608, 8, 4, 9.10),
    ("ring", 4608, 8, 4, 28.65),
    ("doubling", 4608, 12, 1, 11.85),
    ("halving", 4608, 12, 1, 17.40),
    ("ring", 4608, 12, 1, 44.70),
    ("doubling", 4608, 24, 4, 13.35),
    ("halving", 4608, 24, 4, 18.15),
    ("ring", 4608, 24, 4, 92.75),
    ("doubling", 4608, 64, 1, 14.20),
    ("halving", 4608, 64, 1, 24.75),
    ("ring", 4608, 64, 1, 252.90),
    ("doubling", 4608, 64, 8, 19.25),
    ("halving", 4608, 64, 8, 19.50),
    ("ring", 4608, 64, 8, 252.90),
    ("doubling", 4608, 96, 8, 21.25),
    ("halving", 4608, 96, 8, 24.40),
    ("ring", 4608, 96, 8, 380.95),
    ("doubling", 829440, 8, 1, 205.05),
    ("halving", 829440, 8, 1, 128.15),
    ("ring", 829440, 8, 1, 144.15),
    ("doubling", 829440, 8, 4, 435.30),
    ("halving", 829440, 8, 4, 198.80),
    ("ring", 829440, 8, 4, 159.15),
    ("doubling", 829440, 12, 1, 341.80),
    ("halving", 829440, 12, 1, 264.85),
    ("ring", 829440, 12, 1, 165.70),
    ("doubling", 829440, 24, 4, 788.70),
    ("halving", 829440, 24, 4, 397.55),
    ("ring", 829440, 24, 4, 219.25),
    ("doubling", 829440, 64, 1, 410.15),
    ("halving", 829440, 64, 1, 154.65),
    ("ring", 829440, 64, 1, 382.80),
    ("doubling", 829440, 64, 8, 1850.40),
    ("halving", 829440, 64, 8, 279.35),
    ("ring", 829440, 64, 8, 382.80),
    ("doubling", 829440, 96, 8, 1854.60),
    ("halving", 829440, 96, 8, 445.10),
    ("ring", 829440, 96, 8, 511.55),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 12, 31, 64, 1000])
@pytest.mark.parametrize("algorithm", ["ring", "doubling", "halving"])
def test_with_a_host_for_each_rank_the_time_is_the_formula_s(algorithm, ranks):
    expected = terms("all_reduce", algorithm, ranks).of(LINK).seconds(1e6) if ranks > 1 else 0.0
    assert flat_s(algorithm, 1e6, ranks, 1, WITHIN, LINK) == pytest.approx(expected)


@pytest.mark.parametrize("ranks_per_host", [1, 2, 3, 4])
def test_the_busiest_link_of_a_ring_is_that_of_its_schedule(ranks_per_host):
    ranks = 12
    schedule, (found,) = schedule_of("ring", ranks), rounds_of("ring", ranks, ranks_per_host)
    assert found.times == len(schedule.rounds)
    for messages in schedule.rounds:
        leaving = [0] * ranks
        for each in messages:
            if each.sender // ranks_per_host != each.receiver // ranks_per_host:
                leaving[each.sender // ranks_per_host] += each.last - each.first
        assert max(leaving) / schedule.blocks == pytest.approx(found.between)
    assert found.within == pytest.approx(1 / ranks if ranks_per_host > 1 else 0.0)


def test_ranks_of_one_host_send_nothing_between_hosts():
    assert all(each.between == 0 and each.within > 0 for each in rounds_of("halving", 8, 8))


def test_all_ranks_of_a_host_share_its_link():
    """Of doubling's three rounds on two hosts of four ranks, the last sends four whole arrays through each link."""
    assert [(each.within, each.between) for each in rounds_of("doubling", 8, 4)] == [(1, 0), (1, 0), (0, 4)]


@pytest.mark.parametrize(("algorithm", "nbytes", "ranks", "ranks_per_host", "simulated_us"), SIMULATED)
def test_a_simulator_of_messages_finds_the_same_time(algorithm, nbytes, ranks, ranks_per_host, simulated_us):
    """Where ranks are no power of two hosts wait less for each other than rounds do: the forecast is an upper bound."""
    forecast_us = flat_s(algorithm, nbytes, ranks, ranks_per_host, WITHIN, LINK) * 1e6
    whole = algorithm == "ring" or ranks & (ranks - 1) == 0 or ranks_per_host == 1
    assert 0.99 < forecast_us / simulated_us < (1.01 if whole else 1.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("star", 4, 1), r"^algorithm: expected one of ring, doubling, halving, got 'star'$"),
        (("ring", 0, 1), r"^ranks, ranks_per_host: expected numbers from 1 up, got 0 and 1$"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        rounds_of(*arguments)
