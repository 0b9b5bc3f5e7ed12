"""The trace event format's rules that viewers rely on, checked on a whole trace; and what tests read out of one."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
#: Keys that an event of each phase type must have, beside its phase type.
REQUIRED = {
    "X": {"pid", "tid", "ts", "dur", "name", "cat"},
    "i": {"pid", "tid", "ts", "name", "s"},
    "C": {"pid", "tid", "ts", "name", "args"},
    "M": {"pid", "name", "args"},
}


def load(path: Path) -> dict[str, Any]:
    """Return a trace that keeps the rules."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(data)
    check(trace)
    return trace


def check(trace: dict[str, Any]) -> None:
    """Fail where a trace breaks a rule."""
    assert set(trace) == {"displayTimeUnit", "traceEvents", "otherData"}
    for event in trace["traceEvents"]:
        assert event["ph"] in REQUIRED, event
        assert REQUIRED[event["ph"]] <= set(event), event
        assert event.get("dur", 0) >= 0 and event.get("ts", 0) >= 0, event
        assert event["pid"] > 0  # 0 is the idle process
        assert event["name"], event
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    check_names(trace["traceEvents"])
    check_order(slices)
    check_nesting(slices)
    check_flows(slices)


def check_names(events: list[Event]) -> None:
    """Every process and thread has one name, and no thread's number is used in two processes."""
    named = defaultdict(list)
    for event in events:
        if event["name"] in ("process_name", "thread_name"):
            named[event["name"], event["pid"], event.get("tid")].append(event["args"]["name"])
    assert all(len(names) == 1 for names in named.values())
    threads = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    assert all(("process_name", pid, None) in named and ("thread_name", pid, tid) in named for pid, tid in threads)
    assert len({tid for _, tid in threads}) == len(threads)


def check_order(slices: list[Event]) -> None:
    """Each rank writes its slices by their begin."""
    for pid in {event["pid"] for event in slices}:
        begins = [event["ts"] for event in slices if event["pid"] == pid]
        assert begins == sorted(begins)


def ns(event: Event) -> tuple[int, int]:
    """Return begin and end as Perfetto reads them: cut to whole nanoseconds."""
    begin = int(event["ts"] * 1000.0)
    return begin, begin + int(event["dur"] * 1000.0)


def check_nesting(slices: list[Event]) -> None:
    """On a thread, of two slices one lies within the other or they don't overlap."""
    open_: dict[int, list[int]] = defaultdict(list)
    for event in slices:
        begin, end = ns(event)
        ends = open_[event["tid"]]
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or end <= ends[-1], event
        ends.append(end)


def check_flows(slices: list[Event]) -> None:
    """A flow goes out of one slice and into slices that begin later: of the same rank, or of the ranks that waited."""
    sources: dict[str, Event] = {}
    for event in sorted(slices, key=lambda event: event["ts"]):
        assert ("bind_id" in event) == ("flow_out" in event or "flow_in" in event)
        if event.get("flow_out"):
            assert event["bind_id"] not in sources
            sources[event["bind_id"]] = event
        elif event.get("flow_in"):
            source = sources[event["bind_id"]]
            assert source["ts"] < event["ts"]
            assert (source["pid"] == event["pid"]) == (source["name"] != "came last")


def on_thread(trace: dict[str, Any], thread: str, rank: int | None = None) -> list[Event]:
    """Return the slices on all ranks' threads of a name, in all its rows; or on one rank's."""
    tids = {
        event["tid"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name" and event["args"]["name"].split(" (")[0] == thread
    }
    chosen = (event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] in tids)
    return [event for event in chosen if rank is None or event["pid"] == 1000 + rank]


def common_ns(first: list[Event], second: list[Event]) -> int:
    """Return how long some slice of the first list and some slice of the second ran at the same time."""
    total = 0
    others = merged(second)
    for begin, end in merged(first):
        total += sum(max(0, min(end, stop) - max(begin, start)) for start, stop in others)
    return total


def hidden_ns(communication: list[Event]) -> int:
    """Return how long all-reduces in the background were on their way while their rank did something else.

    That is what their slices show outside of those named "exposed".
    """
    background = [event for event in communication if "exposed us" in event.get("args", {})]
    exposed = [event for event in communication if event["name"] == "exposed"]
    return sum(end - begin for begin, end in merged(background)) - common_ns(background, exposed)


def merged(slices: list[Event]) -> list[tuple[int, int]]:
    """Return the slices' (begin, end) in ns, those that overlap as one."""
    result: list[tuple[int, int]] = []
    for begin, end in sorted(map(ns, slices)):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result
