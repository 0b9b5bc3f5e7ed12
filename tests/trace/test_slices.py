"""Records become slices: on their threads, nested, on lanes where they overlap, joined by flows."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.comm.stats.events import Phase
from clcomm.comm.transport.hosts import ClockOffset
from clcomm.insight.trace.events import RankEvents, microseconds
from clcomm.insight.trace.merge import write_trace
from clcomm.insight.trace.part_file import PartWriter, TracePart, agreed_offset, aligned
from tests.trace import rules
from tests.trace.parts import CLOCK, HEADER, parts_of, reduction


def trace_of(folder: Path, limit: int = 1 << 20, **rows: list) -> dict:
    """Write one rank's records as a trace and return it, checked."""
    writer = PartWriter(folder / "part", HEADER)
    writer.append(**{"clocks": [CLOCK], **rows})
    writer.close()
    events = RankEvents(TracePart(folder / "part"), limit)
    write_trace(folder / "trace.json", events.pieces(events.begin_ns), dict)
    return rules.load(folder / "trace.json")


def named(slices: list, name: str) -> list:
    return [event for event in slices if event["name"] == name]


def test_phases_and_kernels_have_their_threads(tmp_path):
    phases = [
        Phase("epoch", 1.0, 2.0), Phase("step", 1.0, 0.5), Phase("data", 1.0, 0.1), Phase("pack", 1.3, 0.1, "", 4),
        Phase("forward_backward", 1.1, 0.2), Phase("step", 1.5, 0.5), Phase("mine", 1.6, 0.1, "a label"),
    ]  # fmt: skip
    trace = trace_of(tmp_path, phases=phases, kernels=[("gemm", (64, 2), 1_150_000_000, 1_250_000_000)])
    steps = rules.on_thread(trace, "steps")
    assert [event["name"] for event in steps] == ["epoch", "step", "forward_backward", "step", "mine"]
    assert [(e["name"], e["ts"], e["dur"]) for e in rules.on_thread(trace, "data")] == [("data", 0.0, 100_000.0)]
    (pack,) = rules.on_thread(trace, "communication")
    assert (pack["name"], pack["args"]) == ("pack", {"bucket": 4})
    (kernel,) = rules.on_thread(trace, "device")
    assert (kernel["name"], kernel["ts"], kernel["dur"]) == ("gemm", 150_000.0, 100_000.0)
    assert kernel["args"] == {"global size": [64, 2]}
    assert steps[-1]["args"] == {"label": "a label"}


def test_a_collective_holds_its_wait_and_its_transfer(tmp_path):
    event = reduction(1.0, 0.010, 3, wait_s=0.004, exposed_s=0.002, last_rank=2, late_s=0.003, wire_nbytes=500)
    whole, wait, transfer = rules.on_thread(trace_of(tmp_path, collectives=[event]), "communication")
    assert whole["args"] == {
        "label": "gradients", "bytes": 1000, "transport": "shared", "sequence": 1, "bucket": 3, "wire bytes": 500,
        "exposed us": 2000.0, "queued us": 0.0, "last rank": 2, "late us": 3000.0, "algbw GB/s": 1e-4,
        "busbw GB/s": 1.5e-4,
    }  # fmt: skip
    assert transfer["args"] == {"GB/s": 0.0001667}  # 1000 bytes in 6 ms
    times = [(event["name"], event["ts"], event["dur"]) for event in (whole, wait, transfer)]
    assert times == [("all_reduce bucket 3", 0.0, 10_000.0), ("wait", 0.0, 4_000.0), ("transfer", 4_000.0, 6_000.0)]


def test_what_was_exposed_of_a_collective_in_the_background_lies_within_it(tmp_path):
    exposed = ((0.999, 1.001), (1.002, 1.003), (1.009, 1.011))
    event = reduction(1.0, 0.010, exposed_s=0.003, exposed=exposed)
    whole, *inner = rules.on_thread(trace_of(tmp_path, collectives=[event]), "communication")
    assert [(e["name"], e["ts"], e["dur"]) for e in inner] == [
        ("exposed", 0.0, 1_000.0), ("exposed", 2_000.0, 1_000.0), ("exposed", 9_000.0, 1_000.0),
    ]  # fmt: skip
    assert rules.hidden_ns([whole, *inner]) == 7_000_000


def test_what_a_collective_in_the_background_waited_lies_within_what_was_exposed(tmp_path):
    exposed, waits = ((1.0, 1.001), (1.004, 1.010)), ((1.004, 1.007), (1.008, 1.010))
    event = reduction(1.0, 0.010, exposed_s=0.007, exposed=exposed, wait_s=0.005, waits=waits)
    trace = trace_of(tmp_path, collectives=[event])
    (_, *inner) = rules.on_thread(trace, "communication")
    assert [(e["name"], e["ts"], e["dur"]) for e in inner] == [
        ("exposed", 0.0, 1_000.0), ("exposed", 4_000.0, 6_000.0), ("wait", 4_000.0, 3_000.0), ("wait", 8_000.0, 2_000.0)
    ]  # fmt: skip
    assert rules.hidden_ns(rules.on_thread(trace, "communication")) == 3_000_000


def test_a_flow_joins_the_last_kernel_before_a_bucket_to_it(tmp_path):
    kernels = [("first", (1,), 0, 1000), ("second", (1,), 10_000, 20_000), ("third", (1,), 50_000, 90_000)]
    buckets = [
        reduction(30e-6, 10e-6, 0), reduction(60e-6, 10e-6, 1), reduction(100e-6, 10e-6, 2, queued_s=35e-6)
    ]  # fmt: skip
    metrics = reduction(120e-6, 10e-6, -1, label="metrics")
    trace = trace_of(tmp_path, kernels=kernels, collectives=[*buckets, metrics])
    source = {event["bind_id"]: event["name"] for event in rules.on_thread(trace, "device") if "flow_out" in event}
    into = {e["name"]: source[e["bind_id"]] for e in rules.on_thread(trace, "communication") if "flow_in" in e}
    assert into == {"all_reduce bucket 0": "second", "all_reduce bucket 1": "second", "all_reduce bucket 2": "second"}


def test_overlapping_collectives_get_rows_of_their_own(tmp_path):
    events = [reduction(0.0, 10e-3, 0, wait_s=1e-3), reduction(2e-3, 10e-3, 1), reduction(3e-3, 1e-3, 2)]
    trace = trace_of(tmp_path, collectives=[*events, reduction(20e-3, 1e-3, 3)])
    rows = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"communication", "communication (2)", "communication (3)"} <= rows
    assert len({event["tid"] for event in rules.on_thread(trace, "communication")}) == 3


times = st.integers(0, 200_000)
spans = st.lists(st.tuples(times, times, st.sampled_from(["step", "epoch", "data", "pack"])), max_size=30)


@given(phases=spans, reductions=spans, kernels=spans)
def test_any_records_make_a_trace_that_keeps_the_rules(tmp_path_factory, phases, reductions, kernels):
    trace = trace_of(
        tmp_path_factory.mktemp("any"),
        phases=[Phase(name, begin * 1e-9, length * 1e-9) for begin, length, name in phases],
        collectives=[reduction(begin * 1e-9, length * 1e-9, wait_s=begin * 1e-9) for begin, length, _ in reductions],
        kernels=[(name, (1,), begin, begin + length) for begin, length, name in kernels],
    )
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    inner = named(slices, "wait") + named(slices, "transfer")
    assert len(slices) - len(inner) == len(phases) + len(reductions) + len(kernels)


@given(st.integers(0, 10**15))
def test_viewers_get_whole_nanoseconds(ns):
    assert int(microseconds(ns) * 1000.0) == ns


def test_a_trace_ends_at_its_limit_with_a_note(tmp_path):
    kernels = [("kernel", (number,), number * 1000, number * 1000 + 500) for number in range(2000)]
    trace = trace_of(tmp_path, limit=100_000, kernels=kernels)
    assert 90_000 < (tmp_path / "trace.json").stat().st_size < 100_000
    kept = rules.on_thread(trace, "device")
    (note,) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert [event["args"]["global size"][0] for event in kept] == list(range(len(kept)))  # the earliest
    assert note["name"].startswith(f"{2000 - len(kept)} slices left out")
    assert note["ts"] > kept[-1]["ts"]


def test_numpy_numbers_are_as_good_as_pythons(tmp_path):
    event = reduction(np.float64(1.0), np.float32(0.5), np.int64(7), nbytes=np.int32(12))
    whole, *_ = rules.on_thread(trace_of(tmp_path, collectives=[event]), "communication")
    assert (whole["args"]["bucket"], whole["args"]["bytes"], whole["dur"]) == (7, 12, 500_000.0)


def test_a_part_that_breaks_off_is_read_as_far_as_it_goes(tmp_path):
    writer = PartWriter(tmp_path / "part", HEADER)
    for number in range(3):
        writer.append(clocks=[CLOCK], phases=[Phase("step", float(number), 0.5)])
    writer.close()
    whole = (tmp_path / "part").read_bytes()
    (tmp_path / "part").write_bytes(whole[:-5])
    assert [row[1] for row in TracePart(tmp_path / "part").rows["phases"]] == [0.0, 1.0]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b"something else entirely"])
def test_what_is_no_part_is_refused(tmp_path, content):
    (tmp_path / "part").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"part: expected a part of a trace, found something else"):
        TracePart(tmp_path / "part")


def test_clocks_on_one_host_are_one_unless_proven_otherwise():
    measured = [(0, ClockOffset()), (0, ClockOffset(800, 900)), (0, ClockOffset(-2_000, 900))]
    assert agreed_offset(measured, 1) == ClockOffset(0, 0)
    assert agreed_offset(measured, 2) == ClockOffset(-2_000, 900)


def test_ranks_of_another_host_share_their_best_measurement():
    measured = [(0, ClockOffset()), (1, ClockOffset(5_000, 900)), (1, ClockOffset(5_100, 200))]
    assert agreed_offset(measured, 1) == agreed_offset(measured, 2) == ClockOffset(5_100, 200)


def test_drift_between_two_readings_is_even():
    align = aligned([(1_000_000, 500, 0, 0, 0), (3_000_000, 700, 0, 0, 0)])
    assert [align(ns) for ns in (1_000_000, 2_000_000, 3_000_000)] == [1_000_500, 2_000_600, 3_000_700]
    assert aligned([(0, 42, 0, 0, 0)])(8) == 50


@given(data=st.data())
def test_arrows_lead_from_the_rank_that_came_last_to_all_that_waited(tmp_path_factory, data):
    ranks = data.draw(st.integers(2, 12))
    arrivals = [data.draw(st.permutations(range(ranks))) for _ in range(data.draw(st.integers(1, 5)))]

    def collectives(rank: int) -> dict[str, list]:
        """Rank r comes to collective n after arrivals[n][r] us; a us after the last one all see that."""
        return {
            "collectives": [
                reduction(
                    number + (arrived := order[rank]) * 1e-6, (ranks - 1 - arrived + 50) * 1e-6, number,
                    sequence=number + 1, last_rank=order.index(ranks - 1),
                    wait_s=(ranks - arrived) * 1e-6 * (arrived < ranks - 1),
                )
                for number, order in enumerate(arrivals)
            ]
        }  # fmt: skip

    trace = parts_of(tmp_path_factory.mktemp("arrows"), ranks, collectives)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    source = {event["bind_id"]: event for event in slices if event.get("flow_out")}
    arrows = [(source[event["bind_id"]]["pid"] - 1000, event["pid"] - 1000) for event in slices if "flow_in" in event]
    last = [order.index(ranks - 1) for order in arrivals]
    expected = [(slow, rank) for slow in last for rank in range(ranks) if rank != slow]
    assert sorted(arrows) == sorted(expected)
    assert {event["name"] for event in source.values()} == {"came last"}
    assert {event["name"] for event in slices if "flow_in" in event} == {"transfer"}
    counts = Counter(event["pid"] for event in slices)
    assert len(set(counts.values())) == 1  # viewers that sort ranks by their slices then sort them by their names


@pytest.mark.parametrize("share", range(8_000, 28_000, 1_117))
def test_no_arrow_begins_at_a_slice_that_the_limit_leaves_out(tmp_path, share):
    """The rank that comes last has more slices, so that its share ends earlier than the one that waits."""

    def rows(rank: int) -> dict[str, list]:
        waits = {"wait_s": 4e-4} if rank == 0 else {}
        return {
            "collectives": [
                reduction(number + 2e-4 * rank, 1e-3, number, sequence=number + 1, last_rank=1, **waits)
                for number in range(60)
            ],
            "phases": [Phase("mine", number + 0.5, 0.1, "a label") for number in range(60 * rank)],
        }

    trace = parts_of(tmp_path, 2, rows, 2 * share)  # loading it checks the rule
    arrows = [event for event in trace["traceEvents"] if "flow_in" in event]
    sources = [event for event in trace["traceEvents"] if "flow_out" in event]
    waited = [event for event in trace["traceEvents"] if event["name"] == "wait"]
    assert len(sources) - 5 <= len(arrows) <= len(sources) < len(waited) < 60


@pytest.mark.parametrize("ranks", [1, 2, 4, 10, 11, 12, 101])
def test_ranks_are_in_order_by_index_and_by_name(tmp_path, ranks):
    trace = parts_of(tmp_path, ranks, lambda rank: {"phases": [Phase("step", 1.0, 0.5)]})
    for kind, key in (("process_sort_index", "sort_index"), ("process_name", "name")):
        found = {e["args"][key]: e["pid"] for e in trace["traceEvents"] if e["name"] == kind}
        assert [found[each] for each in sorted(found)] == [1000 + rank for rank in range(ranks)]


numbers = st.one_of(st.integers(-(10**6), 10**6), st.floats())


@given(losses=st.lists(numbers, min_size=1, max_size=20), nbytes=st.lists(st.integers(0, 1 << 40), max_size=20))
def test_steps_have_their_numbers_and_counters_are_what_was_measured(tmp_path_factory, losses, nbytes):
    phases = [Phase("epoch", 0.0, 100.0, figures=(("epoch", 3),))]
    for index, loss in enumerate(losses):
        phases += [Phase("optimizer", index + 0.25, 0.25)]
        phases += [Phase("step", index, 0.75, figures=(("step", index + 7), ("epoch", 3), ("loss", loss)))]
    events = [reduction(index + 0.125, 0.125, nbytes=each) for index, each in enumerate(nbytes)]
    trace = trace_of(tmp_path_factory.mktemp("steps"), phases=phases, collectives=events)
    steps = rules.on_thread(trace, "steps")
    assert [event["args"]["step"] for event in named(steps, "step")] == [index + 7 for index in range(len(losses))]
    assert [event["args"]["step"] for event in named(steps, "optimizer")] == [index + 7 for index in range(len(losses))]
    assert named(steps, "epoch")[0]["args"] == {"epoch": 3} and "step" not in named(steps, "epoch")[0]["args"]
    inside = [e["args"].get("step") for e in named(rules.on_thread(trace, "communication"), "all_reduce bucket 0")]
    assert inside == [index + 7 if index < len(losses) else None for index in range(len(nbytes))]
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    shown = [event["args"]["of this rank"] for event in counters if event["name"] == "loss"]
    assert shown == [loss for loss in losses if math.isfinite(loss)]
    total = [event["args"]["of this rank"] for event in counters if event["name"] == "bytes"]
    assert total == [sum(nbytes[: index + 1]) for index, each in enumerate(nbytes) if each]
