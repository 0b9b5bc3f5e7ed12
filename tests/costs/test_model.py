"""The cost model: fits recover what made the data, predictions are those worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.model import ALGORITHMS, Cluster, Cost, Terms, fit, plan_s, step_s, terms
from tests.helpers import one_line

SIZES = [1 << exponent for exponent in range(8, 27, 2)]
ALPHAS = st.floats(1e-6, 1e-3)
BETAS = st.floats(1e-11, 1e-8)
COSTS = st.builds(Cost, ALPHAS, BETAS)


def points(cost, noise=None):
    factors = np.ones(len(SIZES)) if noise is None else noise
    return [(n, float(cost.seconds(n) * factor)) for n, factor in zip(SIZES, factors, strict=True)]


# --- fits ---


@given(COSTS)
def test_a_fit_recovers_alpha_and_beta(cost):
    found = fit(points(cost))
    assert found.cost.alpha_s == pytest.approx(cost.alpha_s, rel=1e-5)
    assert found.cost.beta_s_per_byte == pytest.approx(cost.beta_s_per_byte, rel=1e-5)
    assert found.max_error < 1e-5
    assert found.points == tuple(points(cost))


@given(COSTS, st.integers(0, 2**32 - 1))
def test_noise_pulls_a_fit_no_further_than_it_is_large(cost, seed):
    found = fit(points(cost, np.random.default_rng(seed).uniform(0.9, 1.1, len(SIZES))))
    for nbytes in (SIZES[0], SIZES[-1]):
        assert found.cost.seconds(nbytes) == pytest.approx(cost.seconds(nbytes), rel=0.15)
    assert found.max_error < 0.3


@pytest.mark.parametrize("outlier", range(len(SIZES)))
def test_one_call_that_was_disturbed_does_not_spoil_the_fit(outlier):
    cost = Cost(2e-5, 3e-10)
    noise = np.ones(len(SIZES))
    noise[outlier] = 20.0
    found = fit(points(cost, noise))
    assert found.cost.alpha_s == pytest.approx(cost.alpha_s, rel=0.01)
    assert found.cost.beta_s_per_byte == pytest.approx(cost.beta_s_per_byte, rel=0.01)
    assert found.max_error == pytest.approx(0.95, abs=0.01)  # and says that a point lies off
    assert found.median_error < 0.01


def test_errors_are_shares_of_the_measured_time():
    found = fit([(0, 1.0), (0, 2.0), (10, 1.5)])
    predicted = [found.cost.seconds(nbytes) for nbytes, _ in found.points]
    errors = sorted(abs(p / t - 1) for p, (_, t) in zip(predicted, found.points, strict=True))
    assert (found.median_error, found.max_error) == pytest.approx((errors[1], errors[2]))


def test_neither_part_is_ever_negative():
    falling = fit([(1 << 10, 4e-6), (1 << 20, 2e-6)]).cost
    assert falling.beta_s_per_byte == 0
    assert 2e-6 <= falling.alpha_s <= 4e-6
    steep = fit([(100, 1e-9), (1000, 1e-7), (10000, 1e-6)]).cost
    assert steep.alpha_s == 0
    assert steep.beta_s_per_byte > 0


@pytest.mark.parametrize(
    ("given_points", "problem"),
    [
        ([], "points: expected two different sizes or more, got 0 measurements"),
        ([(8, 1e-6), (8, 2e-6)], "points: expected two different sizes or more, got 2 measurements"),
        ([(8, 1e-6), (16, 0.0)], "points: expected sizes of 0 bytes or more and finite times above 0 s"),
        ([(8, 1e-6), (16, math.nan)], "points: expected sizes of 0 bytes or more and finite times above 0 s"),
        ([(-8, 1e-6), (16, 1e-6)], "points: expected sizes of 0 bytes or more and finite times above 0 s"),
    ],
)
def test_points_that_make_no_fit_are_refused(given_points, problem):
    with pytest.raises(ArgumentError) as caught:
        fit(given_points)
    assert one_line(caught) == problem


# --- collectives: Thakur, Rabenseifner and Gropp's table for powers of two ---


@pytest.mark.parametrize(
    ("operation", "algorithm", "ranks", "rounds", "volume"),
    [
        ("all_reduce", "ring", 4, 6, 1.5),
        ("all_reduce", "ring", 3, 4, 4 / 3),
        ("all_reduce", "doubling", 8, 3, 3),
        ("all_reduce", "doubling", 6, 4, 4),  # two rounds among 4 ranks, one before and one after
        ("all_reduce", "halving", 8, 6, 1.75),
        ("all_reduce", "halving", 5, 6, 3.5),
        ("all_gather", "ring", 4, 3, 0.75),
        ("all_gather", "doubling", 4, 2, 0.75),
        ("reduce_scatter", "ring", 8, 7, 0.875),
        ("reduce_scatter", "halving", 8, 3, 0.875),
        ("broadcast", "tree", 8, 3, 3),
        ("broadcast", "scatter", 8, 10, 1.75),
        ("all_reduce", "ring", 1, 0, 0),
    ],
)
def test_rounds_and_volume(operation, algorithm, ranks, rounds, volume):
    assert terms(operation, algorithm, ranks) == pytest.approx((rounds, volume))


@given(COSTS, st.integers(2, 4096))
def test_a_message_is_found_back_from_a_collective(message, ranks):
    ring = terms("all_reduce", "ring", ranks)
    back = ring.message(ring.of(message))
    assert (back.alpha_s, back.beta_s_per_byte) == pytest.approx((message.alpha_s, message.beta_s_per_byte))


def test_unknown_algorithms_and_ranks_are_refused():
    with pytest.raises(ArgumentError, match=r"^algorithm: expected one of .*; got broadcast by ring$"):
        terms("broadcast", "ring", 4)
    with pytest.raises(ArgumentError, match=r"^ranks: expected a number from 1 up, got 0$"):
        terms("all_reduce", "ring", 0)


# --- ranks on hosts ---

LINK = Cost(1e-5, 1e-9)
LOCAL = {2: Cost(2e-6, 3e-10), 4: Cost(6e-6, 5e-10)}


def test_within_a_host_measured_numbers_of_ranks_stand():
    assert Cluster(LOCAL, LINK).parts(1000, 4, 1) == pytest.approx((6e-6 + 5e-7, 0))
    assert Cluster(LOCAL, LINK).parts(1000, 2, 1) == pytest.approx((2e-6 + 3e-7, 0))


def test_within_a_host_others_are_scaled_from_the_largest():
    """8 ranks: 7 counters to wait for instead of 3, 9 arrays through the memory instead of 5."""
    assert Cluster(LOCAL, LINK).parts(1000, 8, 1) == pytest.approx((14e-6 + 9e-7, 0))


@pytest.mark.parametrize(
    ("algorithm", "nbytes", "between_s"),
    [
        ("ring", 1000, 6e-5 + 1.5e-6),  # 4 hosts: 6 messages, 1.5 times the size
        ("ring", 10**8, 6e-5 + 0.15),
        ("recursive", 1000, 2e-5 + 2e-6),  # doubling
        ("recursive", 10**8, 4e-5 + 0.15),  # halving
        ("best", 1000, 2e-5 + 2e-6),
        ("best", 10**8, 4e-5 + 0.15),
    ],
)
def test_between_hosts(algorithm, nbytes, between_s):
    local_s, network_s = Cluster(LOCAL, LINK, algorithm).parts(nbytes, 16, 4)
    assert local_s == pytest.approx(LOCAL[4].seconds(nbytes))
    assert network_s == pytest.approx(between_s)


def test_without_shared_memory_every_rank_is_a_host():
    assert Cluster({}, LINK, "ring").parts(1000, 4, 1) == pytest.approx((0, 6e-5 + 1.5e-6))


def test_ranks_that_do_not_fill_the_hosts_count_as_the_fullest_host():
    assert Cluster(LOCAL, LINK).parts(1000, 7, 2).local_s == pytest.approx(LOCAL[4].seconds(1000))


@given(
    st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.integers(1, 12), st.integers(0, 12),
    st.sampled_from(ALGORITHMS), COSTS, COSTS,
)  # fmt: skip
def test_more_bytes_never_take_less_time(some, others, log_ranks, log_hosts, algorithm, local, link):
    ranks, hosts = 1 << log_ranks, 1 << min(log_hosts, log_ranks)
    cluster = Cluster({4: local}, link, algorithm)
    small, large = sorted((some, others))
    assert cluster.all_reduce_s(small, ranks, hosts) <= cluster.all_reduce_s(large, ranks, hosts) * (1 + 1e-12)


@given(st.integers(0, 1 << 30), st.integers(1, 4096), st.integers(1, 4095), COSTS, COSTS)
def test_more_hosts_with_as_many_ranks_each_never_take_less_time_in_a_ring(nbytes, hosts, more, local, link):
    cluster = Cluster({4: local}, link, "ring")
    few, many = cluster.parts(nbytes, 4 * hosts, hosts), cluster.parts(nbytes, 4 * (hosts + more), hosts + more)
    assert few.local_s == many.local_s
    assert few.network_s <= many.network_s * (1 + 1e-12)


@given(st.integers(0, 1 << 30), st.integers(2, 511), st.integers(1, 511), COSTS)
def test_more_ranks_on_a_host_never_take_less_time(nbytes, ranks, more, local):
    cluster = Cluster({4: local}, LINK)
    assert cluster.all_reduce_s(nbytes, ranks, 1) <= cluster.all_reduce_s(nbytes, ranks + more, 1) * (1 + 1e-12)


@given(st.integers(0, 1 << 30), st.integers(2, 4096), COSTS)
def test_best_is_no_slower_than_any(nbytes, hosts, link):
    seconds = {name: Cluster(LOCAL, link, name).all_reduce_s(nbytes, hosts, hosts) for name in ALGORITHMS}
    assert seconds["best"] == min(seconds.values())


def test_a_cluster_refuses_what_makes_none():
    with pytest.raises(ArgumentError, match=r"^algorithm: expected one of ring, recursive, best, got 'tree'$"):
        Cluster(LOCAL, LINK, "tree")
    with pytest.raises(ArgumentError, match=r"^hosts: expected a number from 1 to the 2 ranks, got 3$"):
        Cluster(LOCAL, LINK).parts(8, 2, 3)
    with pytest.raises(ArgumentError, match=r"^local: expected costs for 2 ranks or more$"):
        Cluster({1: LINK}, LINK)


# --- buckets and steps ---


def test_a_plan_pays_the_latency_for_each_bucket():
    cost = Cost(1e-5, 1e-9)
    assert plan_s([1000, 2000], cost.seconds) == pytest.approx(2e-5 + 3e-6)
    assert plan_s([], cost.seconds) == 0


def test_a_step_without_overlap_is_a_sum():
    seconds = step_s([1, 3], lambda nbytes: nbytes / 10, forward_s=1, backward_s=2, update_s=0.5)
    assert seconds == pytest.approx(1 + 2 + 0.4 + 0.5)


def test_with_overlap_a_bucket_waits_for_its_bytes_and_for_the_one_before():
    """Ready after 1 s and 4 s of backward; the first takes until 1.1 s, the second until 4.3 s."""
    seconds = step_s([1, 3], lambda nbytes: nbytes / 10, forward_s=1, backward_s=4, update_s=0.5, overlap=True)
    assert seconds == pytest.approx(1 + 4.3 + 0.5)
    # Three seconds a byte: the second starts when the first is done, at 4 s, not when it is ready.
    assert step_s([1, 3], lambda nbytes: 3.0 * nbytes, backward_s=4, overlap=True) == pytest.approx(1 + 3 + 9)


@given(st.lists(st.integers(0, 1 << 24), max_size=20), COSTS, st.floats(0, 1))
def test_overlap_is_never_slower_and_hides_no_more_than_there_is(buckets, cost, backward_s):
    apart = step_s(buckets, cost.seconds, backward_s=backward_s)
    together = step_s(buckets, cost.seconds, backward_s=backward_s, overlap=True)
    assert together <= apart * (1 + 1e-12)
    assert together >= max(backward_s, plan_s(buckets, cost.seconds)) * (1 - 1e-12)


def test_terms_scale_a_message():
    assert Terms(6, 1.5).of(Cost(1e-6, 2e-9)) == Cost(pytest.approx(6e-6), pytest.approx(3e-9))
