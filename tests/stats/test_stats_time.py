"""Parts of a call's time: packing, waiting, moving; and the ranks that arrived late."""

from __future__ import annotations

import pytest

from clcomm.comm.stats.comm_stats import BATCH, CommStats, Phase
from tests.stats_events import event, stats_of


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


def test_waiting_not_measured_apart_from_moving_is_neither():
    events = [event(0.010, wait_s=0.004), event(0.010, wait_s=None), event(0.010, wait_s=None, exposed_s=0.003)]
    row = stats_of(events).total("all_reduce")
    parts = {name: row[name] for name in ("seconds", "wait_s", "transfer_s", "wait_unknown_s", "hidden_s", "exposed_s")}
    assert parts == pytest.approx(
        {"seconds": 0.030, "wait_s": 0.004, "transfer_s": 0.006, "wait_unknown_s": 0.013, "hidden_s": 0.007,
         "exposed_s": 0.023}
    )  # fmt: skip


def test_counts_of_new_buckets_begin_at_zero():
    before = [event(0.001, 1000, label="gradients", bucket=bucket) for bucket in (0, 1, 1)]
    before += [Phase("pack", 0.0, 0.1, "gradients", 1), event(0.5, 64, label="mine", bucket=0)]
    stats = stats_of(before)
    stats.merge_buckets("gradients")
    for each in (event(0.002, 5000, label="gradients", bucket=0), Phase("pack", 0.0, 0.2, "gradients", 0)):
        (stats.phase_finished if isinstance(each, Phase) else stats.collective_finished)(each)
    gradients, mine = stats.as_dict()["buckets"]
    assert (gradients["label"], gradients["calls"], gradients["bytes"]) == ("gradients", 1, 5000)
    assert (gradients["seconds"], gradients["pack_s"]) == pytest.approx((0.002, 0.2))
    assert (mine["label"], mine["bucket"], mine["calls"]) == ("mine", 0, 1)
    total = stats.total("all_reduce", "gradients")
    assert (total["calls"], total["bytes"]) == (4, 8000)
    assert (total["seconds"], total["pack_s"]) == pytest.approx((0.005, 0.3))


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("merged_at", [0, 1, 2, 5, 9, 39, None])
def test_what_came_after_a_state_is_right_wherever_buckets_were_merged(first, merged_at):
    """3 buckets a step: `first` steps of 0.5 s a call, then 40 of 0.01 s; the merge is before one of these."""
    stats, earlier = CommStats(), CommStats()
    for step in range(-first, 40):
        if step == 0:
            earlier = CommStats.merged([stats.state()], 1)
        if step == merged_at:
            stats.merge_buckets("gradients")
        for bucket in range(3):
            seconds = 0.5 if step < 0 else 0.01
            stats.collective_finished(event(seconds, 1000, label="gradients", bucket=bucket))
            stats.phase_finished(Phase("pack", 0.0, 2 * seconds, "gradients", bucket))
    since = stats.without(earlier)
    total = since.total("all_reduce", "gradients")
    assert (total["calls"], total["bytes"]) == (120, 120_000)
    assert (total["seconds"], total["pack_s"]) == pytest.approx((1.2, 2.4))
    buckets = [row["calls"] for row in since.as_dict()["buckets"]]
    assert buckets == [40 - (merged_at or 0)] * 3


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
    stats = stats_of([event()] * (2 * BATCH + 2) + [Phase("mine", 0.0, 0.1)])
    assert stats.events == 2 * BATCH  # the last three wait until there are more, or someone wants to read
    overhead, total = stats.as_dict()["stats_overhead"], 2 * BATCH + 3
    assert overhead["events"] == total
    assert overhead["event_s"] * total == pytest.approx(overhead["seconds"]) and overhead["seconds"] > 0
    assert CommStats.merged([stats.state()] * 3, 4).as_dict()["stats_overhead"] == pytest.approx(overhead)
