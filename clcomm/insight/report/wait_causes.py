"""Causes of a step's length: slow ranks and the slow part, shortage of cores, and the largest part."""

from __future__ import annotations

import statistics

from clcomm.comm.stats.cores import parse_cpus
from clcomm.insight.report.analysis import Analysis
from clcomm.insight.report.documents import Record
from clcomm.insight.report.elements import milliseconds
from clcomm.insight.report.largest_row import Cause, compression, evaluation, largest_row
from clcomm.insight.report.step_parts import COMPUTING, COMPUTING_TOO, CORE, DATA, EITHER, OFTEN, REST, WAIT

#: A rank is slow if its own work takes longer than the others' by this share of a mean step.
_SLOW = 0.1
#: Waits for a core are reported if they take at least this share of a step.
_BUSY = 0.1
#: Parts that a slow rank, or too few cores, explain.
_WAITING = frozenset({WAIT, EITHER})


def causes(analysis: Analysis) -> list[Cause]:
    """Return the causes, the largest first; if steps were timed, one is the largest part of a step."""
    if not analysis.training_s or not analysis.steps:
        return []
    waiting = _of_waiting(analysis)
    slow = {cause.rank for cause in waiting if cause is not None}
    found = [*waiting, evaluation(analysis), compression(analysis, slow)]
    named = [cause for cause in found if cause is not None]
    largest = largest_row(analysis, named)
    return sorted([*named, *([largest] if largest else [])], key=lambda cause: -cause.seconds)


def _of_waiting(analysis: Analysis) -> list[Cause | None]:
    """Return the causes of waits for other ranks and for cores."""
    if not analysis.several:
        return [_busy_cores(analysis)]
    crowd = _crowd(analysis)
    found = [_crowding(analysis, crowd), _slow_rank(analysis, crowd)]
    return found if any(found) else [_busy_cores(analysis)]


# --- ranks and cores ---


def _crowd(analysis: Analysis) -> list[Record]:
    """Return the records of ranks that outnumber the cores they share; [] if there are none.

    Of several such groups it is the one with the most ranks per core.
    """
    placed = [record for record in analysis.run.ranks if record["cpus"]]
    cpus = {record["rank"]: parse_cpus(record["cpus"]) for record in placed}
    groups = [
        (own, [r for r in placed if r["host"] == record["host"] and cpus[r["rank"]] <= own])
        for record in placed
        for own in [cpus[record["rank"]]]
    ]
    crowded = [(len(ranks) / len(own), len(ranks), ranks) for own, ranks in groups if len(ranks) > len(own)]
    return max(crowded, key=lambda each: each[:2])[2] if crowded else []


def _crowding(analysis: Analysis, crowd: list[Record]) -> Cause | None:
    if not crowd:
        return None
    cores = max(len(parse_cpus(record["cpus"])) for record in crowd)
    ranks = f"{len(crowd)} ranks" if len(crowd) == len(analysis.run.ranks) else _ranks(crowd)
    host = f" of {crowd[0]['host_name']}" if (analysis.run.figures["hosts"] or 1) > 1 else ""
    share = f"{ranks} share {cores} core{'' if cores == 1 else 's'}{host}"
    waits = [_core_s(analysis, record["rank"]) for record in crowd]
    if any(record["core_waits_s"] is None for record in crowd):
        return Cause(f"More ranks than cores: {share}, so they take turns.", 0.0, explained=_WAITING)
    mean_s = statistics.mean(waits)
    return Cause(
        f"More ranks than cores: {share}, so they take turns; a rank was ready to run without a core for "
        f"{milliseconds(mean_s)} of a step, and ranks that were done waited for it.",
        mean_s,
        explained=_WAITING | {CORE},
    )


def _busy_cores(analysis: Analysis) -> Cause | None:
    """Return a cause if other processes use all ranks' cores alike."""
    step_s = analysis.per_step(analysis.training_s) or 0.0
    mean_s = statistics.mean(_core_s(analysis, record["rank"]) for record in analysis.run.ranks)
    if mean_s < _BUSY * step_s:
        return None
    return Cause(
        f"Other processes run on the ranks' cores: a rank was ready to run without a core for {milliseconds(mean_s)} "
        f"of a step, {mean_s / step_s:.0%}.",
        mean_s,
        explained=frozenset({CORE}),
    )


def _core_s(analysis: Analysis, rank: int) -> float:
    return _steps(analysis)[rank].get(CORE, 0.0)


# --- the slow rank ---


def _steps(analysis: Analysis) -> dict[int, dict[str, float]]:
    """Return the parts of each rank's mean step in seconds, by rank."""
    return {
        record["rank"]: {name: seconds / record["steps"] for name, seconds in parts.items()}
        for (record, _), parts in zip(analysis.warm, analysis.parts, strict=True)
    }


def _slow_rank(analysis: Analysis, crowd: list[Record]) -> Cause | None:
    steps = _steps(analysis)
    if len(steps) < 2:
        return None
    own = {rank: sum(s for name, s in parts.items() if name not in (WAIT, EITHER)) for rank, parts in steps.items()}
    slow = max(own, key=lambda rank: _excess(own, rank))
    longer_s = _excess(own, slow)
    if longer_s < _SLOW * (analysis.per_step(analysis.training_s) or 0.0):
        return None
    by_part = {
        name: _excess({rank: parts.get(name, 0.0) for rank, parts in steps.items()}, slow)
        for name in steps[slow]
        if name not in (WAIT, EITHER)
    }
    part = max(by_part, key=by_part.__getitem__)
    values = {rank: parts.get(part, 0.0) for rank, parts in steps.items()}
    computes = part in (COMPUTING, REST, COMPUTING_TOO)
    why = _launches(analysis, slow, by_part[part]) if computes else ""
    shares = any(record["rank"] == slow for record in crowd)
    sentence = f"Rank {slow} keeps the others waiting: {why or _why(part, values, slow, shares)}"
    return Cause(f"{sentence}{_came_last(analysis, slow)}.", longer_s, slow, _WAITING)


def _excess(values: dict[int, float], rank: int) -> float:
    """Return the difference between a rank's value and the median of the others'."""
    return values[rank] - statistics.median(value for other, value in values.items() if other != rank)


def _why(part: str, values: dict[int, float], slow: int, shares: bool) -> str:
    own, others = milliseconds(values[slow]), milliseconds(values[slow] - _excess(values, slow))
    if part == DATA:
        return f"its loader is slow, it waits {own} of a step for data, the others {others}"
    if part == CORE:
        why = "other ranks or processes run on its core" if shares else "other processes run on its core"
        return f"{why}, it was ready to run without one for {own} of a step, the others for {others}"
    what = "the rest" if part in (REST, COMPUTING_TOO) else part
    return f"{what} takes it {own} of a step, the others {others}"


def _launches(analysis: Analysis, slow: int, longer_s: float) -> str:
    """Return whether kernels or Python take longer; "" if unknown or neither."""
    for key, what in (("launch_step_s", "its Python and launches take"), ("kernel_step_s", "its kernels take")):
        values = {record["rank"]: record[key] for record in analysis.run.ranks}
        if None in values.values():
            return ""
        if _excess(values, slow) > 0.5 * longer_s:
            others = milliseconds(values[slow] - _excess(values, slow))
            return f"{what} {milliseconds(values[slow])} of a step, the others' {others}"
    return ""


def _came_last(analysis: Analysis, rank: int) -> str:
    rows = {row["rank"]: row for row in analysis.counts["stragglers"]}
    if rank not in rows or rows[rank]["share"] * analysis.run.world_size < OFTEN:
        return ""
    seen = sum(row["last"] for row in rows.values())
    late = milliseconds(rows[rank]["mean_late_s"])
    share = f"{rows[rank]['share']:.0%} of {seen:,} collectives"
    return f"; it arrived last in {share}, on average {late} after the second-to-last rank"


def _ranks(records: list[Record]) -> str:
    *others, last = [str(record["rank"]) for record in records]
    return f"ranks {', '.join(others)} and {last}"
