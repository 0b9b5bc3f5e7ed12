"""The state of each rank of a job, from its line on its host's board."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

from clcomm.job.rank_board import Progress
from clcomm.job.stall_message import LEFT, SILENT_S, UNKNOWN

#: A rank that has been in its collective for so long when its line was written waits for those that are not in it.
WAITS_S = 0.5
#: A smaller share of time spent waiting is not worth a rank's name.
WORTH_NAMING = 0.02


class RankRow(NamedTuple):
    """One rank.

    Attributes:
        state: "running", "stopped", "dead", "unknown" (its host does not answer), "silent" (no line for SILENT_S),
            "left" (its program has ended) or "starting" (no figures yet).
        doing: its collective or its phase, with the time in a collective if that is long.
        waits_for: the ranks it waits for now, or else waited for most in the last second.
        step, samples: so far; samples_per_s, steps_per_s: of the last seconds.
        communication, waiting: shares of the last second, 0 to 1; waiting is a part of communication.
        memory: bytes; cores: busy in the last second.
        age_s: of the line.
    """

    rank: int
    state: str
    doing: str
    waits_for: tuple[int, ...]
    step: int
    steps_per_s: float
    samples: int
    samples_per_s: float
    communication: float
    waiting: float
    memory: int
    cores: float
    collectives: int
    age_s: float
    place: str


def rows_of(lines: Sequence[Progress]) -> list[RankRow]:
    now_ns = perf_counter_ns()
    return [_row(line, lines, now_ns) for line in lines]


def _row(line: Progress, lines: Sequence[Progress], now_ns: int) -> RankRow:
    figures = line.figures

    def number(name: str) -> Any:
        value = figures.get(name, 0)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0

    age_s = (now_ns - line.beat_ns) / 1e9 if line.beat_ns else 0.0
    return RankRow(
        line.rank, _state(line, age_s), _doing(line), _waits_for(line, lines), int(number("step")),
        number("steps_per_s"), int(number("samples")), number("samples_per_s"), number("communication"),
        number("waiting"), int(number("memory")), number("cores"), int(number("collectives")), age_s, line.place,
    )  # fmt: skip


def _state(line: Progress, age_s: float) -> str:
    if line.text == LEFT:
        return "left"
    if line.state != "running":
        return line.state
    if not line.figures:
        return "starting"
    return "silent" if age_s > SILENT_S else "running"


def _waited_s(line: Progress) -> float:
    """Return how many seconds a rank had been in its collective when its line was written."""
    return (line.beat_ns - line.began_ns) / 1e9 if line.waits else 0.0


def _doing(line: Progress) -> str:
    if line.state == UNKNOWN:
        return "its host does not answer"
    if line.text:
        waited_s = _waited_s(line)
        return line.text + (f" for {waited_s:.0f} s" if waited_s > WAITS_S else "")
    innermost, _, program = line.place.partition(", from ")
    phase = str(line.figures.get("phase", ""))
    return phase or (program if program and innermost.startswith("<") else innermost)


def _waits_for(line: Progress, lines: Sequence[Progress]) -> tuple[int, ...]:
    if _waited_s(line) > WAITS_S:
        missing = tuple(other.rank for other in lines if other.key != line.key)
        if missing:
            return missing
    named, share = line.figures.get("waits_for", -1), line.figures.get("waiting", 0.0)
    known = isinstance(named, int) and isinstance(share, (int, float)) and share > WORTH_NAMING
    return (named,) if known and named not in (-1, line.rank) else ()
