"""Counts and bandwidths of what was communicated, in memory that does not grow with it."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest

from clcomm.comm.stats import comm_stats
from clcomm.comm.stats.comm_stats import MOST_TALLIES, OTHER_LABELS, CommStats, Phase, bus_factor
from clcomm.comm.stats.tally import Tally
from tests.stats_events import event, stats_of


def test_an_operations_counts():
    row = stats_of([event(0.001, 1000), event(0.003, 2000), event(0.005, 0)]).total("all_reduce")
    assert (row["calls"], row["bytes"], row["average_bytes_per_call"]) == (3, 3000, 1000.0)
    assert row["seconds"] == pytest.approx(0.009)
    assert row["mean_s"] == pytest.approx(0.003)
    assert row["max_s"] == 0.005
    assert row["failures"] == 0


def test_failed_calls_are_counted_apart():
    row = stats_of([event(0.001, 1000), event(60.0, 5000, failed=True)]).total("all_reduce")
    assert (row["calls"], row["bytes"], row["failures"], row["max_s"]) == (1, 1000, 1, 0.001)


def test_labels_are_counted_apart_and_together():
    stats = stats_of([event(nbytes=10), event(nbytes=20, label="gradients"), event(nbytes=5, operation="broadcast")])
    assert stats.total("all_reduce")["bytes"] == 30
    assert stats.total("all_reduce", "gradients")["bytes"] == 20
    assert stats.total("all_reduce", "")["bytes"] == 10
    assert stats.total("gather")["calls"] == stats.total("gather")["average_bytes_per_call"] == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_bandwidths_are_those_of_nccl_tests(world_size):
    n = world_size
    factors = {
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "broadcast": 1.0,
    }
    for operation, factor in factors.items():
        row = stats_of([event(0.5, 10**9, operation), event(1.5, 10**9, operation)], n).total(operation)
        expected = [pytest.approx(1e9), pytest.approx(factor * 1e9)] if n > 1 else [None, None]  # alone nothing moves
        assert [row["algbw_bytes_per_s"], row["busbw_bytes_per_s"]] == expected
        assert bus_factor(operation, n) == factor


def test_memory_does_not_grow_with_calls():
    def size_after(calls):
        stats = CommStats(4)
        for number in range(calls):
            stats.collective_finished(event(1e-6 * (number + 1), 1 << 40, bucket=number % 8, last_rank=number % 4))
            stats.phase_finished(Phase("pack", 0.0, 1e-6, "", number % 8))
        return len(pickle.dumps(stats.state())), len(pickle.dumps(stats))

    short, long = size_after(2_000), size_after(20_000)
    # The state names each bin that is not empty, of 1,048 a bucket; what is kept has all bins from the start.
    assert long[0] <= short[0] + 8 * 1048 * 8
    assert long[1] <= short[1] + 3000


def test_a_million_steps_stats_stay_below_5_mb():
    rng = np.random.default_rng(0)
    tracemalloc.start()
    stats = CommStats(1024)
    for number, seconds in enumerate(rng.lognormal(-7, 2, 20_000)):
        stats.collective_finished(
            event(seconds, 1 << 40, label=f"label {number % 40}", bucket=number % 300, last_rank=number % 1024)
        )
        stats.phase_finished(Phase("pack", 0.0, seconds, f"label {number % 40}", number % 300))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stats.flush()
    # As many keys as it distinguishes: from here on only counts grow.
    assert len(stats.tallies) >= MOST_TALLIES
    assert kept + len(pickle.dumps(stats.state())) < 5e6


def test_buckets_and_labels_beyond_the_limit_are_still_counted():
    events = [event(nbytes=1, label="gradients")]
    events += [event(nbytes=1, label="gradients", bucket=bucket) for bucket in range(MOST_TALLIES + 10)]
    events += [event(nbytes=1, label=f"user {number}") for number in range(5)]
    stats = stats_of(events)
    assert stats.total("all_reduce")["calls"] == stats.total("all_reduce")["bytes"] == len(events)
    assert stats.total("all_reduce", "gradients")["calls"] == MOST_TALLIES + 11
    assert stats.total("all_reduce", OTHER_LABELS)["calls"] == 5


def test_a_row_names_every_transport_that_moved_its_data():
    """Calls of one label take turns between transports; beyond the limit those of several labels share a row."""
    for names in (["mpi"], ["shared", "mpi"], ["mpi+shared", "solo"], ["shared", "mpi", "hierarchical", "mpi+shared"]):
        own = [event(label="x")._replace(transport=names[number % len(names)]) for number in range(40)]
        many = [event(label=f"user {number}") for number in range(MOST_TALLIES)]
        shared = [each._replace(label=f"late {number}") for number, each in enumerate(own)]
        stats = stats_of([*own, *many, *shared])
        expected = "+".join(sorted({name for each in names for name in each.split("+")}))
        assert stats.total("all_reduce", "x")["transport"] == expected
        assert set(stats.total("all_reduce", OTHER_LABELS)["transport"].split("+")) - {"solo"} == (
            set(expected.split("+")) - {"solo"}
        )


def test_combinations_beyond_the_limit_make_no_tallies_of_their_own(monkeypatch):
    made = []

    class Counted(Tally):
        __slots__ = ()

        def __init__(self, *arguments):
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(comm_stats, "Tally", Counted)
    stats = CommStats(4)
    for number in range(3 * MOST_TALLIES):
        stats.collective_finished(event(label=f"label {number}"))
    stats.flush()
    assert len(made) == len(stats.tallies) == MOST_TALLIES + 1


def test_a_reset_forgets_everything():
    stats = stats_of([event(last_rank=1), event(failed=True), Phase("pack", 0.0, 0.1)])
    stats.reset()
    assert stats.as_dict() == CommStats(4).as_dict()
    stats.collective_finished(event())
    assert stats.total("all_reduce")["calls"] == 1
