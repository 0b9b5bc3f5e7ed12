"""Percentiles of durations: numpy's to within a bin, and never beyond the longest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.comm.stats.comm_stats import Histogram
from tests.stats_events import durations, event, stats_of


@pytest.mark.parametrize("at_once", [True, False])
@given(values=st.lists(durations, min_size=1, max_size=300), share=st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_percentiles_are_numpys_to_within_a_bin(at_once, values, share):
    histogram = Histogram()
    if at_once:
        histogram.add_all(values)
    else:
        for value in values:
            histogram.add(value)
    lower, higher = (np.percentile(values, share * 100, method=m) for m in ("lower", "higher"))
    assert lower / 1.02 <= histogram.percentile(share) <= higher * 1.02


def test_percentiles_of_many_durations():
    values = np.random.default_rng(0).lognormal(-7, 1, 20_000)
    histogram = Histogram()
    histogram.add_all(values)
    for share in (0.5, 0.95, 0.99):
        assert histogram.percentile(share) == pytest.approx(np.quantile(values, share), rel=0.02)


def test_durations_outside_the_bins_are_counted_at_their_ends():
    row = stats_of([event(0.0), event(1e-12), event(1e6)]).total("all_reduce")
    assert row["calls"] == 3
    assert row["max_s"] == 1e6
    assert row["p50_s"] <= 2e-7
    assert 100 <= row["p95_s"] <= 1e6


def test_no_percentile_exceeds_the_maximum():
    row = stats_of([event(0.00101)]).total("all_reduce")
    assert row["p50_s"] <= row["p95_s"] <= row["max_s"] == 0.00101
