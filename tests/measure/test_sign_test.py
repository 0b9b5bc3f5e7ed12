"""Choices from noisy times: the right one where times separate, the default where they do not, over drawn courses."""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pytest

from clcomm.comm.costs.estimates import sign_test
from clcomm.comm.costs.forecast import Candidate
from clcomm.sync.auto_buckets import BucketTuner, elapsed

#: Courses drawn for each kind of noise and difference; `make courses` draws more.
SEEDS = int(os.environ.get("CLCOMM_TEST_TUNING_SEEDS", "100"))
STEP_S = 1e-3


def gaussian(rng, count):
    return 1 + 0.1 * rng.standard_normal(count)


def heavy_tailed(rng, count):
    return 1 + 0.05 * np.abs(rng.standard_cauchy(count))


def spikes(rng, count):
    return 1 + 0.02 * rng.standard_normal(count) + 5.0 * (rng.random(count) < 0.05)


def busy_at_times(rng, count):
    """Return noise of a machine on which something else runs for dozens of steps."""
    busy = np.cumsum(rng.random(count) < 0.02) % 2
    return (1 + 0.05 * rng.standard_normal(count)) * (1 + busy)


def drifting(rng, count):
    return (1 + 0.05 * rng.standard_normal(count)) * np.linspace(1, 2, count)


NOISE = {each.__name__: each for each in (gaussian, heavy_tailed, spikes, busy_at_times, drifting)}


def chosen(true: list[float], noise, seed: int) -> tuple[int, str]:
    """Return which of the sizes 0, 1, ... a tuner ends with whose steps take so many times STEP_S, and why."""
    rng = np.random.default_rng(seed)
    factors = iter(noise(rng, 1000))
    tuner = BucketTuner([Candidate(size, (size,), STEP_S) for size in range(len(true))])
    while tuner.decision is None:
        if tuner.add(0.0, STEP_S * true[tuner.size] * abs(next(factors))):
            tuner.decide(elapsed(tuner.times()[np.newaxis], [0]))
    return tuner.size, tuner.decision.reason


@pytest.mark.parametrize("sizes", [2, 3, 4, 6])
@pytest.mark.parametrize("noise", NOISE)
def test_without_a_difference_the_cost_models_choice_stays(noise, sizes):
    found = [chosen([1.0] * sizes, NOISE[noise], seed) for seed in range(SEEDS)]
    others = sum(size != 0 for size, _ in found)
    assert others <= 0.02 * SEEDS + 1
    assert all("the cost model's choice" in reason for _, reason in found)
    assert all(("within the noise" in reason or "far behind" in reason) == (size == 0) for size, reason in found)


@pytest.mark.parametrize("best", [1, 3, 5])
@pytest.mark.parametrize("noise", NOISE)
def test_what_takes_half_as_long_is_found(noise, best):
    true = [2.0] * 6
    true[best] = 1.0
    found = [chosen(true, NOISE[noise], seed) for seed in range(SEEDS)]
    assert sum(size == best for size, _ in found) >= 0.9 * SEEDS
    assert all("faster in" in reason and "than the cost model's choice, 0 B" in reason for s, reason in found if s)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("slower", [1.02, 1.1, 1.5, 4.0])
def test_the_cost_models_choice_stays_where_it_is_the_fastest(noise, slower):
    found = [chosen([1.0, *[slower] * 5], NOISE[noise], seed)[0] for seed in range(SEEDS)]
    assert sum(size != 0 for size in found) <= 0.02 * SEEDS + 1


@pytest.mark.parametrize("gain", [0.03, 0.1, 0.3])
def test_with_little_noise_small_differences_are_found(gain):
    def noise(rng, count):
        return 1 + 0.1 * gain * rng.standard_normal(count)

    found = [chosen([1.0, 1.0 - gain, 1.0], noise, seed)[0] for seed in range(SEEDS)]
    assert sum(size == 1 for size in found) >= 0.99 * SEEDS


def test_a_difference_that_is_not_worth_it_changes_nothing():
    default_s = np.linspace(1, 2, 20)
    assert sign_test(default_s, 0.99 * default_s)[:2] == (False, 20)
    assert sign_test(default_s, 0.97 * default_s)[:2] == (True, 20)


@pytest.mark.parametrize("turns", range(1, 15))
def test_how_many_wins_it_takes_is_counted_from_all_outcomes(turns):
    """A coin's outcomes, all of them, give the chance of so many wins."""
    outcomes = np.array(list(itertools.product((0, 1), repeat=turns))).sum(axis=1)
    for wins in range(turns + 1):
        other_s = np.where(np.arange(turns) < wins, 0.5, 1.1)
        found = sign_test(np.ones(turns), other_s)
        is_unlikely = (outcomes >= wins).mean() <= 0.005
        assert (found.wins, found.turns) == (wins, turns)
        assert found.is_faster == (is_unlikely and np.median(other_s) < 0.98)
    assert math.isclose(2.0**-turns, (outcomes == turns).mean())
