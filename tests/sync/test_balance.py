"""Shares by speed: the least time of a step, the same on every rank, kept while little is gained."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.sync.balance import MOST_TIMES, Balancer, balanced_shares, step_s
from tests.helpers import one_line

COSTS = st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=6)


def steady(costs) -> np.ndarray:
    """Return the costs of one step."""
    return np.array(costs, float)[:, None]


def grain_of(batch: int) -> int:
    return max(n for n in range(1, max(1, batch // 16) + 1) if batch % n == 0)


@given(costs=COSTS, batch=st.integers(1, 300))
def test_shares_add_up_and_are_within_bounds(costs, batch):
    shares, grain = balanced_shares(steady(costs), batch), grain_of(batch)
    assert sum(shares) == batch * len(costs) and len(shares) == len(costs)
    assert all(grain <= share <= MOST_TIMES * batch and share % grain == 0 for share in shares)
    assert step_s(steady(costs), shares) <= step_s(steady(costs), [batch] * len(costs)) * (1 + 1e-12)


@given(costs=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=3), batch=st.integers(1, 6))
def test_no_other_shares_take_less_time(costs, batch):
    total, most = batch * len(costs), MOST_TIMES * batch
    others = itertools.product(range(1, total + 1), repeat=len(costs))
    best = min(step_s(steady(costs), each) for each in others if sum(each) == total and max(each) <= most)
    assert step_s(steady(costs), balanced_shares(steady(costs), batch)) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_of_two_ranks_that_are_slow_now_and_then_no_other_shares_take_less_time(seed):
    rng = np.random.default_rng(seed)
    costs = rng.uniform(1, 2, (2, 1)) * (1 + rng.uniform(0, 3, (2, 1)) * (rng.random((2, 50)) < rng.random()))
    costs *= rng.uniform(0.9, 1.1, costs.shape)
    batch = int(rng.integers(2, 17))
    best = min(step_s(costs, (first, 2 * batch - first)) for first in range(1, 2 * batch))
    assert step_s(costs, balanced_shares(costs, batch)) == pytest.approx(best)


def test_a_rank_that_is_slow_in_some_steps_gets_fewer_samples_than_its_mean_speed_would_have_it():
    costs = np.ones((2, 100))
    costs[1, ::2] = 3.0
    assert balanced_shares(steady(costs.mean(1)), 12) == (16, 8) and step_s(costs, (16, 8)) == 20
    assert balanced_shares(costs, 12) == (18, 6) and step_s(costs, (18, 6)) == 18


def test_a_rank_of_half_the_speed_gets_half_of_the_logical_shards():
    assert balanced_shares(steady([1.0, 2.0]), 5, 6) == (20, 10)
    assert balanced_shares(steady([1.0, 1.0, 1.0]), 5, 8) == (15, 15, 10)
    assert balanced_shares(steady([1.0, 1e9]), 5, 2) == (5, 5)  # each has one


def test_a_rank_of_half_the_speed_gets_half_the_samples():
    assert balanced_shares(steady([1.0, 2.0]), 9) == (12, 6)
    assert balanced_shares(steady([2.0, 1.0, 1.0, 1.0]), 32)[0] < 20
    assert balanced_shares(steady([1.0, 1e9]), 8) == (15, 1)
    assert balanced_shares(steady([1.0] * 7 + [1e9]), 8)[-1] == 1


class Simulated:
    """Ranks with given seconds a sample and a step, each with its Balancer, in one process."""

    def __init__(self, costs, batch, **settings):
        self.costs, self.sent = costs, [None] * len(costs)
        self.balancers = [Balancer(_Gathering(self, rank), batch, **settings) for rank in range(len(costs))]

    def gather(self, rank, own):
        """Return all ranks' figures; in a simulation the ranks call one after another, so the first run collects."""
        self.sent[rank] = own
        return np.concatenate([own if each is None or each.shape != own.shape else each for each in self.sent])

    def run(self, steps, noise=0.0, overhead=0.0, seed=0):
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            shares = self.balancers[0].shares
            times = [
                (cost * share + overhead) * (1 + noise * rng.standard_normal())
                for cost, share in zip(self.costs, shares, strict=True)
            ]
            for _attempt in range(2):  # the second time with all ranks' figures
                kept = [dict(vars(balancer)) for balancer in self.balancers]
                for balancer, share, seconds in zip(self.balancers, shares, times, strict=True):
                    balancer.step_finished(share, seconds)
                if _attempt == 0:
                    for balancer, state in zip(self.balancers, kept, strict=True):
                        vars(balancer).update(state)
            assert len({balancer.shares for balancer in self.balancers}) == 1
        return self.balancers[0]


class _Gathering:
    def __init__(self, job, rank):
        self._job, self.rank, self.size = job, rank, len(job.costs)

    def all_gather(self, own, label):
        return self._job.gather(self.rank, own)


@given(costs=st.lists(st.floats(1e-4, 1e-3), min_size=2, max_size=4), overhead=st.floats(0, 0.01))
def test_ranks_end_with_nearly_the_least_time(costs, overhead):
    job = Simulated(costs, 64)
    job.run(200, overhead=overhead)
    shares = job.balancers[0].shares
    took = step_s(steady(costs), shares) + overhead
    assert took <= 1.06 * (step_s(steady(costs), balanced_shares(steady(costs), 64)) + overhead) + 2e-4 * 4


def test_equal_ranks_keep_equal_shares_in_spite_of_noise():
    balancer = Simulated([1e-3] * 4, 64).run(400, noise=0.05)
    assert balancer.changes == 0 and balancer.shares == (64,) * 4


def test_a_change_of_speed_is_followed_and_its_end_too():
    job = Simulated([1e-3, 1e-3], 64)
    assert job.run(50).shares == (64, 64)
    job.costs = [1e-3, 2e-3]
    slowed = job.run(100).shares
    assert 80 <= slowed[0] <= 92
    job.costs = [1e-3, 1e-3]
    assert abs(job.run(200).shares[0] - 64) <= 4


def test_a_rank_without_samples_changes_nothing():
    balancer = Balancer(Communicator(transport="solo"), 8, window=2)
    assert [balancer.step_finished(0, 0.0) for _ in range(10)] == [False] * 10 and balancer.shares == (8,)


@pytest.mark.parametrize("name", ["batch_size", "window", "least_gain"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_settings_out_of_bounds(name, value):
    with pytest.raises(ArgumentError) as caught:
        Balancer(Communicator(transport="solo"), **{"batch_size": 8, name: value})
    assert one_line(caught) == f"{name}: expected a number from 1 up, got {value!r}"


@pytest.mark.mpi(min_size=2)
def test_ranks_take_the_same_shares():
    comm = Communicator()
    balancer = Balancer(comm, 32, window=3)
    for _ in range(40):
        balancer.step_finished(balancer.shares[comm.rank], balancer.shares[comm.rank] * (1 + comm.rank) * 1e-3)
    assert comm.all_gather_object(balancer.shares) == [balancer.shares] * comm.size
    assert balancer.shares == balanced_shares(steady([1 + rank for rank in range(comm.size)]), 32)
