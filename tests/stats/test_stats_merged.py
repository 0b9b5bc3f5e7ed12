"""Stats of several ranks, merged in any order, and what of them is JSON."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.comm.stats.comm_stats import CommStats, Phase
from tests.stats_events import event, events, phases, stats_of


@given(st.lists(st.lists(events | phases, max_size=20), min_size=1, max_size=4))
def test_merging_gives_the_same_in_any_order(ranks):
    states = [stats_of(each).state() for each in ranks]
    merged = [CommStats.merged(order, 4).as_dict() for order in itertools.permutations(states)]
    assert all(each == merged[0] for each in merged)


def test_a_merge_is_the_average_rank():
    ranks = [[event(0.001 * (rank + 1), 1000, failed=rank == 2), event(0.001 * (rank + 1), 1000)] for rank in range(4)]
    ranks[2].append(event(0.001, 1000))  # the failed call, tried again
    merged = CommStats.merged((stats_of(each).state() for each in ranks), 4)
    row = merged.total("all_reduce")
    assert (merged.ranks, row["calls"], row["bytes"], row["average_bytes_per_call"]) == (4, 2, 2000, 1000.0)
    assert row["seconds"] == pytest.approx((2 * 1 + 2 * 2 + 3 + 1 + 2 * 4) * 0.001 / 4)
    assert (row["max_s"], row["failures"]) == (0.004, 1)
    assert row["p50_s"] == pytest.approx(0.002, rel=0.02)


def test_a_merge_changes_none_of_its_parts():
    one, other = stats_of([event()]), stats_of([event(), event()])
    before = (one.as_dict(), other.as_dict())
    CommStats.merged([one.state(), other.state()], 2)
    assert (one.as_dict(), other.as_dict()) == before


def test_a_state_is_json():
    stats = stats_of([event(last_rank=1), event(label="gradients"), Phase("pack", 0.0, 0.1)])
    copied = CommStats.merged([json.loads(json.dumps(stats.state()))], 4)
    assert copied.as_dict() == stats.as_dict()


@given(st.lists(events | phases, max_size=30))
def test_a_dict_is_json(drawn):
    stats = stats_of(drawn)
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()


def test_a_dict_names_its_schema_and_ranks():
    report = stats_of([event(0.25), event(0.5, operation="broadcast")]).as_dict()
    assert (report["schema"], report["world_size"], report["ranks_merged"]) == (4, 4, 1)
    assert report["seconds"] == pytest.approx(0.75)
    assert [row["operation"] for row in report["operations"]] == ["all_reduce", "broadcast"]
