"""The message for a stalled collective: the waiting rank, the missing ranks, and what these do instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns

from clcomm.base.errors import name_ranks
from clcomm.comm.watch.status_page import RankStatus

#: A running rank whose line is older than this is in code that blocks all of its threads.
SILENT_S = 3.0
#: Text of the line of a rank that has left the program.
LEFT = "has left the program"
#: State of the ranks of a host that does not answer.
UNKNOWN = "unknown"


def describe(
    own_rank: int, lines: Sequence[RankStatus], waited_s: float, name_of: Callable[[Sequence[int]], str] = name_ranks
) -> str:
    """Return a sentence on where a rank waits and what the missing ranks do.

    Args:
        own_rank: the rank that waits.
        lines: all ranks', including its own.
        waited_s: for how long it has waited.
        name_of: returns ranks in words.
    """
    own = next(line for line in lines if line.rank == own_rank)
    missing: dict[str, list[int]] = {}
    for line in lines:
        if line.key != own.key or line.state != "running":
            missing.setdefault(_activity_of(line), []).append(line.rank)
    listed = ", ".join(f"{name_of(ranks)} ({doing})" for doing, ranks in missing.items())
    known = f"missing: {listed}" if missing else "no rank is missing"
    where = f", called at {own.place}" if own.place else ""
    return f"{name_of([own.rank])} has waited {waited_s:.1f} s in {own.text}{where}; {known}"


def left_while_awaited(rank: str, text: str, place: str) -> str:
    """Return the reason to end the job when a rank has left the program and another one waits for it.

    Args:
        rank: the rank that waits, in words.
        text: its collective.
        place: its source location, or "".
    """
    where = f", called at {place}" if place else ""
    return f"left while {rank} waits for it in {text}{where}"


def is_lowest(rank: int, lines: Sequence[RankStatus], limit_s: float) -> bool:
    """Return whether no lower rank that still responds has waited for longer than the limit."""
    now_ns = perf_counter_ns()
    waiting = [
        line.rank for line in lines
        if line.waits and line.state == "running" and now_ns - line.began_ns > limit_s * 1e9
        and now_ns - line.beat_ns < SILENT_S * 1e9
    ]  # fmt: skip
    return rank <= min(waiting, default=rank)


def _activity_of(line: RankStatus) -> str:
    if line.state == UNKNOWN:
        return "no rank on its host answers"
    if line.text == LEFT:
        return LEFT
    at = f" at {line.place}" if line.place else ""
    inside = f"in {line.text}{at}" if line.text else f"in no collective but{at or ' elsewhere'}"
    if line.state == "stopped":
        return f"stopped by SIGSTOP or a debugger, was {inside}"
    if line.state == "dead":
        return f"its process has ended, was {inside}"
    silent_s = (perf_counter_ns() - line.beat_ns) / 1e9
    return f"lets no other thread work for {silent_s:.0f} s, was {inside}" if silent_s > SILENT_S else inside
