"""A rank's records as slices on threads: placed in rows, properly nested, and connected by flows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

from clcomm.comm.stats.comm_stats import bus_factor
from clcomm.comm.stats.events import Collective, Phase
from clcomm.insight.trace.part_file import TracePart

STEPS, COMMUNICATION, DEVICE, DATA = "steps", "communication", "device", "data"
#: Threads in the order of display.
THREADS = (STEPS, COMMUNICATION, DEVICE, DATA)
_THREAD_OF = {"pack": COMMUNICATION, "unpack": COMMUNICATION, "round": COMMUNICATION, "data": DATA}
#: The name of the empty slice that marks when its rank arrived at a collective as the last one.
CAME_LAST = "came last"
#: Figures of a phase that are its numbers; others become counters.
NUMBERS = ("step", "epoch", "round", "stage", "micro-batch")
#: The most rows of a thread.
LANES = 10
#: Slices that overlap by no more than this, the error of the clocks, count as consecutive.
TOLERANCE_NS = 5_000

#: A slice's arguments in the trace, as JSON has them.
Args = dict[str, Any]


class Slice(NamedTuple):
    """A stretch of time on a thread, in ns of rank 0's clock.

    Attributes:
        lane: the row of the thread; slices that overlap without being nested are in different rows.
        flow_out, flow_in: numbers of flows; a flow leads from `flow_out` to the equal `flow_in`, 0: none.
        wait_ns: the wait for other ranks at the start of a collective.
        queued_ns: time in the queue before a collective's start.
        last_rank: the rank that arrived last at a collective; -1: unknown.
        sequence: the number of a collective; arrows lead from the rank that came last to those that waited, 0: none.
        counters: values by name at the end of the slice.
        exposed: (begin, end) of the times within a background collective in which its rank could do nothing else.
        waits: the parts of `exposed` in which the rank waited for others.
    """

    begin_ns: int
    end_ns: int
    thread: str
    name: str
    category: str
    args: Args = {}  # noqa: RUF012 - never written to
    lane: int = 0
    flow_out: int = 0
    flow_in: int = 0
    wait_ns: int = 0
    queued_ns: int = 0
    last_rank: int = -1
    sequence: int = 0
    counters: tuple[tuple[str, float], ...] = ()
    exposed: tuple[tuple[int, int], ...] = ()
    waits: tuple[tuple[int, int], ...] = ()


def slices_of(part: TracePart, align: Callable[[int], int]) -> list[Slice]:
    """Return a part's slices in the order of their begin, enclosing ones first.

    `align` maps the part's times to rank 0's clock.
    """
    slices = [
        Slice(align(begin), align(end), DEVICE, name, "kernel", {"global size": list(size)})
        for name, size, begin, end in part.rows["kernels"]
    ]
    size = part.header["world_size"]
    slices += [_collective(Collective(*row), align, size) for row in part.rows["collectives"]]
    slices += [_phase(Phase(*row), align) for row in part.rows["phases"]]
    complete = _with_flows(_with_lanes(_ordered(_with_steps(_with_bytes(slices)))))
    return _ordered(each for whole in complete for each in _split(whole, part.rank))


def _ordered(slices: Iterable[Slice]) -> list[Slice]:
    return sorted(slices, key=lambda each: (each.begin_ns, -each.end_ns))


def _phase(phase: Phase, align: Callable[[int], int]) -> Slice:
    begin = align(_ns(phase.began_s))
    args: Args = {"label": phase.label} if phase.label else {}
    if phase.bucket >= 0:
        args["bucket"] = phase.bucket
    args |= {name: value if math.isfinite(value) else str(value) for name, value in phase.figures}
    counters = tuple((name, v) for name, v in phase.figures if name not in NUMBERS and math.isfinite(v))
    thread = _THREAD_OF.get(phase.name, STEPS)
    return Slice(begin, begin + _ns(phase.seconds), thread, phase.name, "phase", args, counters=counters)


def _with_steps(slices: list[Slice]) -> Iterator[Slice]:
    steps = sorted((each.begin_ns, each.end_ns, each.args["step"]) for each in slices if "step" in each.args)
    for each in slices:
        index = bisect_right(steps, (each.begin_ns, math.inf, 0)) - 1
        is_within = index >= 0 and each.end_ns <= steps[index][1] + TOLERANCE_NS
        if is_within and each.category != "kernel":
            each = each._replace(args={"step": steps[index][2], **each.args})
        yield each


def _with_bytes(slices: list[Slice]) -> list[Slice]:
    """Return the slices in the order of their end; collectives get the sum of all bytes so far as a counter."""
    total, result = 0, []
    for each in sorted(slices, key=lambda each: each.end_ns):
        if nbytes := each.args.get("bytes", 0):
            total += nbytes
            each = each._replace(counters=(("bytes", total),))
        result.append(each)
    return result


def _collective(event: Collective, align: Callable[[int], int], world_size: int) -> Slice:
    begin = align(_ns(event.began_s))
    subject = f"bucket {event.bucket}" if event.bucket >= 0 else event.label
    where = f" on {event.part}" if event.part else ""
    args: Args = {
        "label": event.label, "bytes": event.nbytes, "transport": event.transport, "sequence": event.sequence,
    }  # fmt: skip
    if event.part:
        args |= {"part": event.part, "ranks of part": event.part_size}
    if event.bucket >= 0:
        args["bucket"] = event.bucket
    if event.nbytes and event.seconds > 0:
        algbw = event.nbytes / event.seconds / 1e9
        args["algbw GB/s"] = _rounded(algbw)
        ranks = event.part_size or world_size
        if ranks > 1:
            args["busbw GB/s"] = _rounded(algbw * bus_factor(event.operation, ranks))
    if event.wire_nbytes is not None:
        args["wire bytes"] = event.wire_nbytes
    if event.exposed_s is not None:
        args |= {"exposed us": round(event.exposed_s * 1e6, 3), "queued us": round(event.queued_s * 1e6, 3)}
    if event.last_rank >= 0:
        args |= {"last rank": event.last_rank, "late us": round(event.late_s * 1e6, 3)}
    if event.failed:
        args["failed"] = True
    length = _ns(event.seconds)
    return Slice(
        begin, begin + length, COMMUNICATION, f"{event.operation} {subject}".strip() + where, "communication", args,
        wait_ns=min(length, _ns(event.wait_s or 0.0)), queued_ns=_ns(event.queued_s), last_rank=event.last_rank,
        sequence=_number(event),
        exposed=_aligned(event.exposed, align), waits=_aligned(event.waits, align),
    )  # fmt: skip


def _number(event: Collective) -> int:
    """Return a number for a collective, unique among the ranks that took part, if its last rank is known.

    The parts of a Communicator number their collectives alike; the last rank is in one of them only.
    """
    if not event.part or event.last_rank < 0:
        return event.sequence
    text = f"{event.part} {event.sequence} {event.last_rank}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 4


def _speed(whole: Slice, ns: int) -> Args:
    return {"GB/s": _rounded(whole.args["bytes"] / ns)} if whole.args["bytes"] and ns else {}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _aligned(spans: Iterable[tuple[float, float]], align: Callable[[int], int]) -> tuple[tuple[int, int], ...]:
    return tuple((align(_ns(begin_s)), align(_ns(end_s))) for begin_s, end_s in spans)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _with_flows(slices: list[Slice]) -> list[Slice]:
    """Return the slices with a flow into each bucket's all-reduce from the last kernel before its start."""
    kernels = sorted((each.end_ns, number) for number, each in enumerate(slices) if each.category == "kernel")
    for number, each in enumerate(slices):
        if each.category != "communication" or "bucket" not in each.args:
            continue
        started_ns = each.begin_ns - each.queued_ns
        last = bisect_right(kernels, (started_ns + TOLERANCE_NS, len(slices))) - 1
        while last >= 0 and slices[kernels[last][1]].begin_ns >= started_ns:
            last -= 1
        if last >= 0:
            source = kernels[last][1]
            slices[source] = slices[source]._replace(flow_out=source + 1)
            slices[number] = each._replace(flow_in=source + 1)
    return slices


def _with_lanes(ordered: Iterable[Slice]) -> list[Slice]:
    """Return the slices in lanes in which they are consecutive; those of STEPS may be nested too."""
    lanes: dict[str, list[list[int]]] = {thread: [] for thread in THREADS}  # ends of the slices that are open
    placed = []
    for each in ordered:
        rows = lanes[each.thread]
        fits = ((lane, fitted) for lane, ends in enumerate(rows) if (fitted := _fitted(each, ends)) is not None)
        lane, fitted = next(fits, (len(rows), each))
        if lane == LANES:  # no row is free: the slice is cut to begin after the last one in the last row
            lane, end = LANES - 1, rows[-1][-1]
            fitted = each._replace(begin_ns=end, end_ns=max(end, each.end_ns) if each.thread != STEPS else end)
        elif lane == len(rows):
            rows.append([])
        rows[lane].append(fitted.end_ns)
        placed.append(fitted._replace(lane=lane) if lane else fitted)
    return placed


def _fitted(each: Slice, ends: list[int]) -> Slice | None:
    """Return the slice after or within the open slices of a lane, cut by at most the tolerance; None without room.

    `ends` are the ends of the open slices, the innermost last; those that the slice follows are removed.
    """
    begin, end = each.begin_ns, each.end_ns
    nests = each.thread == STEPS
    while ends and ends[-1] <= begin + TOLERANCE_NS and not (nests and end <= ends[-1]):
        begin = max(begin, ends.pop())
    if ends:
        if not nests or end > ends[-1] + TOLERANCE_NS:
            return None
        end = min(end, ends[-1])
    return each if (begin, end) == each[:2] else each._replace(begin_ns=begin, end_ns=max(begin, end))


def _split(whole: Slice, rank: int) -> list[Slice]:
    """Return a slice and the slices within it: wait and transfer, or its exposed stretches and their waits."""
    sequence, whole = whole.sequence, whole._replace(sequence=0)
    inner = whole._replace(args={}, flow_in=0, wait_ns=0, last_rank=-1, counters=(), exposed=(), waits=())
    came_last = whole.last_rank == rank
    if (whole.wait_ns or came_last) and not whole.exposed:
        all_here = whole.begin_ns if came_last else min(whole.end_ns, whole.begin_ns + whole.wait_ns)
        waited = inner._replace(end_ns=all_here, name=CAME_LAST if came_last else "wait", sequence=sequence * came_last)
        moved = inner._replace(begin_ns=all_here, name="transfer", args=_speed(whole, whole.end_ns - all_here))
        waited_for_last = whole.last_rank >= 0 and not came_last
        return [whole, waited, moved._replace(sequence=sequence if waited_for_last else 0)]
    named = [("exposed", *span) for span in whole.exposed] + [("wait", *span) for span in whole.waits]
    cut = ((name, max(begin, whole.begin_ns), min(end, whole.end_ns)) for name, begin, end in named)
    return [whole, *(inner._replace(begin_ns=b, end_ns=e, name=name) for name, b, e in cut if b < e)]
