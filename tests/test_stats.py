"""Counts, percentiles and bandwidths of what was communicated."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from clcomm.stats import BATCH, MOST_TALLIES, OTHER_LABELS, Collective, CommStats, Histogram, Phase, bus_factor


def event(seconds=0.001, nbytes=1000, operation="all_reduce", label="", failed=False, bucket=-1, **more):
    return Collective(operation, label, nbytes, seconds, "solo", 1, failed, bucket=bucket, **more)


def stats_of(events, world_size=4):
    stats = CommStats(world_size)
    for each in events:
        (stats.phase_finished if isinstance(each, Phase) else stats.collective_finished)(each)
    return stats


durations = st.floats(1e-7, 90.0)
events = st.builds(
    event,
    seconds=durations,
    nbytes=st.integers(0, 1 << 30),
    operation=st.sampled_from(["all_reduce", "broadcast", "barrier"]),
    label=st.sampled_from(["", "gradients"]),
    failed=st.booleans(),
    bucket=st.integers(-1, 2),
    wait_s=st.none() | st.floats(0, 1e-7),
    exposed_s=st.none() | st.floats(0, 1e-7),
    last_rank=st.integers(-1, 3),
    late_s=st.floats(0, 1),
)
phases = st.builds(
    Phase,
    st.sampled_from(["pack", "unpack", "step"]),
    st.just(0.0),
    durations,
    bucket=st.integers(-1, 2),
    communication_s=durations,
)

# --- percentiles ---


@given(st.lists(durations, min_size=1, max_size=300), st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_percentiles_are_numpys_to_within_a_bin(values, share):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    lower, higher = (np.percentile(values, share * 100, method=m) for m in ("lower", "higher"))
    assert lower / 1.02 <= histogram.percentile(share) <= higher * 1.02


def test_percentiles_of_many_durations():
    values = np.random.default_rng(0).lognormal(-7, 1, 20_000)
    histogram = Histogram()
    for value in values:
        histogram.add(value)
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


# --- counts ---


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
        assert row["algbw_bytes_per_s"] == pytest.approx(1e9)
        assert row["busbw_bytes_per_s"] == pytest.approx(factor * 1e9)
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
    stats.settle()
    # As many different things as it tells apart: from here on only counts grow.
    assert len(stats.tallies) >= MOST_TALLIES
    assert kept + len(pickle.dumps(stats.state())) < 5e6


def test_more_buckets_and_labels_than_are_told_apart_are_still_counted():
    events = [event(nbytes=1, label="gradients")]
    events += [event(nbytes=1, label="gradients", bucket=bucket) for bucket in range(MOST_TALLIES + 10)]
    events += [event(nbytes=1, label=f"user {number}") for number in range(5)]
    stats = stats_of(events)
    assert stats.total("all_reduce")["calls"] == stats.total("all_reduce")["bytes"] == len(events)
    assert stats.total("all_reduce", "gradients")["calls"] == MOST_TALLIES + 11
    assert stats.total("all_reduce", OTHER_LABELS)["calls"] == 5


def test_a_reset_forgets_everything():
    stats = stats_of([event(last_rank=1), event(failed=True), Phase("pack", 0.0, 0.1)])
    stats.reset()
    assert stats.as_dict() == CommStats(4).as_dict()
    stats.collective_finished(event())
    assert stats.total("all_reduce")["calls"] == 1


# --- what the time went into ---


def test_a_calls_time_is_split_into_waiting_and_moving_and_phases_stand_beside_it():
    stats = stats_of([
        event(0.010, label="gradients", bucket=0, wait_s=0.004),
        event(0.020, label="gradients", bucket=1, wait_s=0.001),
        Phase("pack", 0.0, 0.002, "gradients", 0), Phase("pack", 0.0, 0.003, "gradients", 1),
        Phase("unpack", 0.0, 0.005, "gradients", 1), Phase("pack", 0.0, 1.0, "other", 0), Phase("step", 0.0, 0.1),
    ])  # fmt: skip
    row = stats.total("all_reduce", "gradients")
    parts = {name: row[name] for name in ("pack_s", "wait_s", "transfer_s", "unpack_s")}
    assert parts == pytest.approx({"pack_s": 0.005, "wait_s": 0.005, "transfer_s": 0.025, "unpack_s": 0.005})
    assert row["wait_s"] + row["transfer_s"] == pytest.approx(row["seconds"]) == pytest.approx(0.030)
    first, second = stats.as_dict()["buckets"]
    assert (first["bucket"], second["bucket"], first["operation"], first["label"]) == (0, 1, "all_reduce", "gradients")
    for name in ("calls", "bytes", "seconds", *parts):
        assert first[name] + second[name] == pytest.approx(row[name])
    assert [(p["phase"], p["label"], p["calls"]) for p in stats.as_dict()["phases"]] == [
        ("pack", "gradients", 2), ("pack", "other", 1), ("step", "", 1), ("unpack", "gradients", 1),
    ]  # fmt: skip
    assert stats.as_dict()["phases"][0]["max_s"] == pytest.approx(0.003)


def test_phases_are_beside_reductions_alone():
    stats = stats_of([event(operation="all_gather", label="gradients"), Phase("pack", 0.0, 1.0, "gradients")])
    assert stats.total("all_gather")["pack_s"] == 0


def test_hidden_time_is_what_the_caller_did_not_wait_for():
    row = stats_of([event(0.010, exposed_s=0.004), event(0.010, exposed_s=0.0), event(0.010)]).total("all_reduce")
    assert (row["exposed_s"], row["hidden_s"]) == (pytest.approx(0.014), pytest.approx(0.016))


def test_waiting_that_is_not_told_from_moving_is_neither():
    events = [event(0.010, wait_s=0.004), event(0.010, wait_s=None), event(0.010, wait_s=None, exposed_s=0.003)]
    row = stats_of(events).total("all_reduce")
    parts = {name: row[name] for name in ("seconds", "wait_s", "transfer_s", "untold_s", "hidden_s", "exposed_s")}
    assert parts == pytest.approx(
        {"seconds": 0.030, "wait_s": 0.004, "transfer_s": 0.006, "untold_s": 0.013, "hidden_s": 0.007,
         "exposed_s": 0.023}
    )  # fmt: skip


def test_buckets_that_are_cut_anew_are_counted_from_then_on():
    before = [event(0.001, 1000, label="gradients", bucket=bucket) for bucket in (0, 1, 1)]
    before += [Phase("pack", 0.0, 0.1, "gradients", 1), event(0.5, 64, label="mine", bucket=0)]
    stats = stats_of(before)
    stats.start_buckets_anew("gradients")
    for each in (event(0.002, 5000, label="gradients", bucket=0), Phase("pack", 0.0, 0.2, "gradients", 0)):
        (stats.phase_finished if isinstance(each, Phase) else stats.collective_finished)(each)
    gradients, mine = stats.as_dict()["buckets"]
    assert (gradients["label"], gradients["calls"], gradients["bytes"]) == ("gradients", 1, 5000)
    assert (gradients["seconds"], gradients["pack_s"]) == pytest.approx((0.002, 0.2))
    assert (mine["label"], mine["bucket"], mine["calls"]) == ("mine", 0, 1)
    total = stats.total("all_reduce", "gradients")
    assert (total["calls"], total["bytes"]) == (4, 8000)
    assert (total["seconds"], total["pack_s"]) == pytest.approx((0.005, 0.3))


def test_what_of_a_phase_was_communication():
    stats = stats_of([Phase("step", 0.0, 0.5, communication_s=0.2), Phase("step", 1.0, 0.3, communication_s=0.1)])
    (row,) = CommStats.merged([stats.state()] * 2, 2).as_dict()["phases"]
    assert (row["calls"], row["seconds"], row["communication_s"], row["max_s"]) == pytest.approx((2, 0.8, 0.3, 0.5))


def test_stragglers():
    events = [event(last_rank=rank, late_s=late_s) for rank, late_s in ((3, 0.001), (3, 0.003), (1, 0.5), (3, 0.002))]
    one, other = stats_of([*events, event(last_rank=-1, late_s=9.0)]), stats_of(events)
    for stats in (one, CommStats.merged([one.state(), other.state()], 4)):
        first, third = stats.as_dict()["stragglers"]
        assert first == {"rank": 1, "last": 1, "share": 0.25, "late_s": 0.5, "mean_late_s": 0.5, "max_late_s": 0.5}
        assert third == pytest.approx(
            {"rank": 3, "last": 3, "share": 0.75, "late_s": 0.006, "mean_late_s": 0.002, "max_late_s": 0.003}
        )


@pytest.mark.parametrize(
    ("operation", "label", "nbytes", "counts"),
    [
        ("all_reduce", "gradients", 1000, True), ("reduce_scatter", "gradients", 1000, True),
        ("all_reduce", "", 8, True), ("broadcast", "", 8, True),
        ("barrier", "", 0, False), ("broadcast_object", "", 0, False), ("broadcast_object", "logs", 0, False),
        ("all_gather", "checks", 8, False), ("broadcast", "parameters", 1000, False), ("all_reduce", "mine", 8, False),
    ],
)  # fmt: skip
def test_lateness_is_that_of_gradients_and_of_arrays_without_a_label(operation, label, nbytes, counts):
    stats = stats_of([event(0.001, nbytes, operation, label, last_rank=1, late_s=10.0)])
    assert [row["rank"] for row in stats.as_dict()["stragglers"]] == [1] * counts
    assert stats.total(operation, label)["calls"] == 1


def test_what_the_stats_themselves_cost():
    assert CommStats().as_dict()["stats_overhead"] == {"events": 0, "event_s": 0.0, "seconds": 0.0}
    stats = stats_of([event()] * 130 + [Phase("step", 0.0, 0.1)])
    assert stats.events == 2 * BATCH  # the last three wait until there are more, or someone wants to read
    overhead = stats.as_dict()["stats_overhead"]
    assert overhead["events"] == 131
    assert overhead["event_s"] * 131 == pytest.approx(overhead["seconds"]) and overhead["seconds"] > 0
    assert CommStats.merged([stats.state()] * 3, 4).as_dict()["stats_overhead"] == pytest.approx(overhead)


# --- several ranks ---


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


# --- to look at ---


@given(st.lists(events | phases, max_size=30))
def test_a_dict_is_json(drawn):
    stats = stats_of(drawn)
    assert json.loads(json.dumps(stats.as_dict())) == stats.as_dict()


def test_a_dict_says_what_it_holds():
    report = stats_of([event(0.25), event(0.5, operation="broadcast")]).as_dict()
    assert (report["schema"], report["world_size"], report["ranks_merged"]) == (3, 4, 1)
    assert report["seconds"] == pytest.approx(0.75)
    assert [row["operation"] for row in report["operations"]] == ["all_reduce", "broadcast"]


def rendered(stats):
    with open(os.devnull, "w") as nowhere:
        console = Console(width=200, record=True, file=nowhere)
        console.print(stats.table())
    return console.export_text()


def test_the_table_shows_every_operation_with_its_units():
    text = rendered(stats_of([event(0.0015, 827_688, label="gradients")] * 235 + [event(0.001, 0, "barrier")]))
    assert "all_reduce gradients" in text
    assert "235" in text
    assert "194,506,680" in text
    assert "827,688" in text
    for heading in ("calls", "bytes/call", "p95", "algbw", "busbw", "failed", "ms", "GB/s"):
        assert heading in text
    assert "0.552" in text  # 827,688 bytes in 1.5 ms
    assert "0.828" in text  # times 2 * 3 / 4


def test_the_table_has_three_significant_digits_and_a_dash_where_nothing_moves():
    text = rendered(stats_of([event(0.0102, 8, "broadcast"), event(4.56e-7, 1 << 20), event(0.001, 0, "barrier")]))
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    total, algbw = rows["operation"].index("total"), -3
    assert (rows["broadcast"][total], rows["broadcast"][algbw]) == ("10.2", "7.84e-07")
    assert (rows["all_reduce"][total], rows["all_reduce"][algbw]) == ("0.000456", "2,300")
    assert rows["barrier"].count("-") == 2


def test_an_empty_table_renders():
    assert "operation" in rendered(CommStats())


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_table_keeps_to_its_width(width):
    slow = event(0.1, 1000, "broadcast", label="parameters")
    stats = stats_of([event(0.0015, 827_688, label="gradients")] * 235 + [slow])
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        console.print(stats.table(width=width))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    heading, row = lines[1].split(), next(line for line in lines if "235" in line)
    assert row.startswith("all_reduce gradients")
    missing = " ".join(lines).partition("no room for ")[2]
    for column, least in (("calls", 40), ("total", 40), ("bytes", 60), ("bytes/call", 60), ("p50", 80), ("max", 120)):
        assert (column in heading) == (width >= least) == (column not in missing.replace(",", "").split())
