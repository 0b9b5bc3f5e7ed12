"""Forecasts of a step on jobs of other sizes, by formulas."""

from __future__ import annotations

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.jobs import (
    HIERARCHICAL,
    PLAIN,
    RING,
    SELDOM,
    WAYS,
    ZERO3,
    Job,
    Strategy,
    Workload,
    collective_s,
    forecast,
    jobs_of,
)
from clcomm.comm.costs.model import Cluster, Cost

LINK, LOCAL = Cost(1e-5, 1e-9), Cost(4e-6, 2e-10)
WORK = Workload((4000, 60_000, 400_000), (400_000, 64_000), forward_s=1e-3, backward_s=2e-3, other_s=5e-4)
NBYTES = 464_000


def test_a_ring_of_single_ranks_takes_its_messages_after_what_a_rank_computes():
    found = forecast(WORK, Cluster({}, LINK), Job(16, 1), RING)
    assert found.communication_s == pytest.approx(2 * 30 * 1e-5 + 2 * 15 / 16 * NBYTES * 1e-9)
    assert found.step_s == pytest.approx(3.5e-3 + found.communication_s)
    assert found.exposed_s == pytest.approx(found.communication_s)
    assert found.sent_nbytes == pytest.approx(2 * 15 / 16 * NBYTES)


def test_plain_takes_the_faster_of_two_algorithms_for_each_bucket():
    whole = Workload((NBYTES,), (NBYTES,), 0, 0, 0)
    small = Workload((64,), (64,), 0, 0, 0)
    cluster, job = Cluster({}, LINK), Job(16, 1)
    assert forecast(whole, cluster, job, PLAIN).sent_nbytes == pytest.approx(2 * 15 / 16 * NBYTES)
    assert forecast(small, cluster, job, PLAIN).sent_nbytes == 4 * 64
    assert forecast(small, cluster, job, PLAIN).step_s == pytest.approx(4 * (1e-5 + 64e-9))


def test_hierarchical_reduces_in_memory_and_then_each_lane_sends_its_part():
    found = forecast(WORK, Cluster({4: LOCAL}, LINK), Job(8, 4), HIERARCHICAL)
    compared_s, local_s = 2 * 3 * 1e-5, 2 * 4e-6 + NBYTES * 2e-10
    between_s = 2 * 14 * 1e-5 + 2 * 7 / 8 * NBYTES * 1e-9
    assert found.communication_s == pytest.approx(compared_s + local_s + between_s)
    assert found.sent_nbytes == pytest.approx(2 * 7 / 8 * NBYTES / 4)


def test_overlap_exposes_what_backward_does_not_hide():
    cluster, job = Cluster({}, LINK), Job(8, 1)
    apart, over = (
        forecast(Workload(**{**vars(WORK), "overlap": on}), cluster, job, RING) for on in (False, True)
    )  # fmt: skip
    first_s, last_s = (14 * 1e-5 + 2 * 7 / 8 * nbytes * 1e-9 for nbytes in WORK.buckets)
    end_s = max(2e-3, 2e-3 * 400 / 464 + first_s) + last_s
    assert over.communication_s == pytest.approx(apart.communication_s)
    assert over.exposed_s == pytest.approx(end_s - 2e-3) and over.exposed_s < apart.exposed_s
    assert over.step_s == pytest.approx(WORK.compute_s + over.exposed_s)


def test_the_best_buckets_are_no_slower_than_the_run_s():
    for way in WAYS:
        found = forecast(WORK, Cluster({2: LOCAL}, LINK), Job(4, 2), way)
        assert found.best is not None and found.best.seconds + WORK.other_s <= found.step_s * (1 + 1e-9)


def test_an_exchange_every_h_steps_costs_a_step_an_h_th_of_it():
    cluster, job = Cluster({}, LINK), Job(8, 1)
    found = forecast(WORK, cluster, job, RING, Strategy(SELDOM, 50))
    once_s = collective_s(cluster, job, RING)(NBYTES)
    assert found.exposed_s == pytest.approx(once_s / 50) and found.best is None
    assert found.sent_nbytes == pytest.approx(2 * 7 / 8 * NBYTES / 50)


def test_zero_3_moves_half_as_much_again_as_an_all_reduce_and_hides_none_of_it():
    cluster, job = Cluster({}, LINK), Job(8, 1)
    whole = forecast(WORK, cluster, job, RING)
    found = forecast(Workload(**{**vars(WORK), "overlap": True}), cluster, job, RING, Strategy(ZERO3))
    assert found.exposed_s == pytest.approx(1.5 * whole.communication_s)
    assert found.sent_nbytes == pytest.approx(1.5 * whole.sent_nbytes)


def test_one_host_alone_sends_nothing():
    found = forecast(WORK, Cluster({4: LOCAL}, LINK), Job(1, 4), HIERARCHICAL)
    assert found.sent_nbytes == 0 and found.communication_s == pytest.approx(2 * 4e-6 + NBYTES * 2e-10)


def test_the_table_s_jobs_have_8_to_4096_ranks_and_the_asked_one():
    assert [job.ranks for job in jobs_of(6, 5, 8, 4096)] == [12, 24, 30, 48, 96, 192, 384, 768, 1536, 3072]
    assert [job.hosts for job in jobs_of(1, 1, 8, 64)] == [1, 8, 16, 32, 64]


def test_what_is_refused():
    with pytest.raises(ArgumentError, match=r"^way: expected one of hierarchical, plain, ring, got 'star'$"):
        forecast(WORK, Cluster({}, LINK), Job(2, 1), "star")
    with pytest.raises(ArgumentError, match=r"^ranks_per_host: expected 1 without a measured local cost, got 2$"):
        forecast(WORK, Cluster({}, LINK), Job(2, 2), RING)
