"""Medians and their intervals, against the binomial distribution and against drawn samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.comm.costs.estimates import Estimate, estimate


def coverage(count: int, k: int) -> float:
    """Probability that the k-th values from both ends of `count` enclose the median."""
    return 1 - 2 * sum(math.comb(count, below) for below in range(k)) / 2**count


@given(st.integers(1, 400))
def test_the_interval_is_the_tightest_with_its_confidence(count: int) -> None:
    found = estimate(range(count))
    assert found.median == (count - 1) / 2
    if count < 6:
        assert (found.low, found.high) == (None, None)
        assert coverage(count, 1) < 0.95
    else:
        k = int(found.low) + 1
        assert found.high == count - k
        assert coverage(count, k) >= 0.95 > coverage(count, k + 1)


def test_of_many_values_the_interval_is_that_of_the_normal_distribution() -> None:
    found = estimate(range(10_000))
    assert (found.low, found.high) == pytest.approx((4999.5 - 98, 4999.5 + 98), abs=2)


def test_the_median_is_enclosed_as_often_as_promised() -> None:
    drawn = np.random.default_rng(5).exponential(size=(2000, 20))
    enclosed = [found.low <= math.log(2) <= found.high for found in map(estimate, drawn)]
    assert coverage(20, 6) - 0.02 < np.mean(enclosed) < coverage(20, 6) + 0.02


def test_figures_differ_where_their_intervals_do_not_touch() -> None:
    low, high, wide = Estimate(1, 0.9, 1.1), Estimate(2, 1.2, 2.2), Estimate(1.5, 1.0, 1.8)
    assert low.differs_from(high) is True and high.differs_from(low) is True
    assert low.differs_from(wide) is False and wide.differs_from(high) is False
    assert low.differs_from(Estimate(9)) is None


def test_how_it_is_written() -> None:
    assert Estimate(0.010224, 0.01012, 0.010371).scaled(1e3).text() == "10.224 (10.120-10.371)"
    assert Estimate(1234.5).text(1) == "1,234.5"
    assert Estimate(1.0, 0.5).as_dict() == {"median": 1.0, "low": 0.5, "high": None}
    assert math.isnan(estimate([]).median) and estimate([]).text() == "-"
