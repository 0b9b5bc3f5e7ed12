"""Why ranks wait for each other: the rank that is slow and what takes it longer, and ranks that have too few cores."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from clcomm.cores import parse_cpus
from clcomm.report.facts import Facts
from clcomm.report.parts import CLIPPING, COMPUTING, COMPUTING_TOO, CORE, DATA, EITHER, OPTIMIZER, REST, WAIT
from clcomm.report.shapes import milliseconds

#: A rank is slow when its own work takes so much of a mean step longer than that of the others.
_SLOW = 0.1
#: Waits for a core are worth a sentence from this share of a step on.
_BUSY = 0.1
#: A rank came last in more collectives than its fair share when it is this many times that.
_OFTEN = 1.5


class Cause(NamedTuple):
    """A sentence, how much of a mean step it accounts for, and the rank it names, -1: none."""

    sentence: str
    seconds: float
    rank: int = -1


def causes(facts: Facts) -> list[Cause]:
    """Return what makes ranks wait, the largest first; empty where nothing stands out or nothing is known."""
    if not facts.several or not facts.training_s or not facts.steps:
        return []
    crowd = _crowd(facts)
    found = [_crowding(facts, crowd), _slow_rank(facts, crowd)]
    if not any(found):
        found = [_busy_cores(facts)]
    return sorted((cause for cause in found if cause is not None), key=lambda cause: -cause.seconds)


# --- ranks and cores ---


def _crowd(facts: Facts) -> list[dict[str, Any]]:
    """Return the records of ranks that share fewer cores than they are, those with the fewest a rank; often none."""
    placed = [record for record in facts.run.ranks if record["cpus"]]
    cpus = {record["rank"]: parse_cpus(record["cpus"]) for record in placed}
    groups = [
        (own, [r for r in placed if r["host"] == record["host"] and cpus[r["rank"]] <= own])
        for record in placed
        for own in [cpus[record["rank"]]]
    ]
    crowded = [(len(ranks) / len(own), len(ranks), ranks) for own, ranks in groups if len(ranks) > len(own)]
    return max(crowded, key=lambda each: each[:2])[2] if crowded else []


def _crowding(facts: Facts, crowd: list[dict[str, Any]]) -> Cause | None:
    if not crowd:
        return None
    cores = max(len(parse_cpus(record["cpus"])) for record in crowd)
    who = f"{len(crowd)} ranks" if len(crowd) == len(facts.run.ranks) else _ranks(crowd)
    host = f" of {crowd[0]['host_name']}" if (facts.run.figures["hosts"] or 1) > 1 else ""
    share = f"{who} share {cores} core{'' if cores == 1 else 's'}{host}"
    waits = [_core_s(facts, record["rank"]) for record in crowd]
    if any(record["core_waits_s"] is None for record in crowd):
        return Cause(f"More ranks than cores: {share}, so they take turns.", 0.0)
    mean_s = statistics.mean(waits)
    return Cause(
        f"More ranks than cores: {share}, so they take turns; a rank was ready to run without a core for "
        f"{milliseconds(mean_s)} of a step, and ranks that were done waited for it.",
        mean_s,
    )


def _busy_cores(facts: Facts) -> Cause | None:
    """Return that other programs take all ranks' cores alike."""
    step_s = facts.per_step(facts.training_s) or 0.0
    mean_s = statistics.mean(_core_s(facts, record["rank"]) for record in facts.run.ranks)
    if mean_s < _BUSY * step_s:
        return None
    return Cause(
        f"Other processes run on the ranks' cores: a rank was ready to run without a core for {milliseconds(mean_s)} "
        f"of a step, {mean_s / step_s:.0%}.",
        mean_s,
    )


def _core_s(facts: Facts, rank: int) -> float:
    return _steps(facts)[rank].get(CORE, 0.0)


# --- the slow rank ---


def _steps(facts: Facts) -> dict[int, dict[str, float]]:
    """Return the parts of each rank's mean step in seconds, by rank."""
    return {
        record["rank"]: {name: seconds / record["steps"] for name, seconds in parts.items()}
        for (record, _), parts in zip(facts.by_rank, facts.parts, strict=True)
    }


def _slow_rank(facts: Facts, crowd: list[dict[str, Any]]) -> Cause | None:
    steps = _steps(facts)
    if len(steps) < 2:
        return None
    own = {rank: sum(s for name, s in parts.items() if name not in (WAIT, EITHER)) for rank, parts in steps.items()}
    slow = max(own, key=lambda rank: _excess(own, rank))
    longer_s = _excess(own, slow)
    if longer_s < _SLOW * (facts.per_step(facts.training_s) or 0.0):
        return None
    by_part = {
        name: _excess({rank: parts.get(name, 0.0) for rank, parts in steps.items()}, slow)
        for name in steps[slow]
        if name not in (WAIT, EITHER)
    }
    part = max(by_part, key=by_part.__getitem__)
    values = {rank: parts.get(part, 0.0) for rank, parts in steps.items()}
    why = _launches(facts, slow, by_part[part]) if part in (COMPUTING, CLIPPING, OPTIMIZER, REST, COMPUTING_TOO) else ""
    shares = any(record["rank"] == slow for record in crowd)
    sentence = f"Rank {slow} keeps the others waiting: {why or _why(part, values, slow, shares)}"
    return Cause(f"{sentence}{_came_last(facts, slow)}.", longer_s, slow)


def _excess(values: dict[int, float], rank: int) -> float:
    """Return by how much a rank's value is above the median of the others'."""
    return values[rank] - statistics.median(value for other, value in values.items() if other != rank)


def _why(part: str, values: dict[int, float], slow: int, shares: bool) -> str:
    own, others = milliseconds(values[slow]), milliseconds(values[slow] - _excess(values, slow))
    if part == DATA:
        return f"its loader is slow, it waits {own} of a step for data, the others {others}"
    if part == CORE:
        whose = "others, ranks or not, have its core" if shares else "other processes run on its core"
        return f"{whose}, it was ready to run without one for {own} of a step, the others for {others}"
    what = "what is in no other part" if part in (REST, COMPUTING_TOO) else part
    return f"{what} takes it {own} of a step, the others {others}"


def _launches(facts: Facts, slow: int, longer_s: float) -> str:
    """Return whether it is kernels or Python that take longer; empty where that is not measured, or neither."""
    for key, what in (("launch_step_s", "its Python and launches take"), ("kernel_step_s", "its kernels take")):
        values = {record["rank"]: record[key] for record in facts.run.ranks}
        if None in values.values():
            return ""
        if _excess(values, slow) > 0.5 * longer_s:
            others = milliseconds(values[slow] - _excess(values, slow))
            return f"{what} {milliseconds(values[slow])} of a step, the others' {others}"
    return ""


def _came_last(facts: Facts, rank: int) -> str:
    rows = {row["rank"]: row for row in facts.counts["stragglers"]}
    if rank not in rows or rows[rank]["share"] * facts.run.world_size < _OFTEN:
        return ""
    seen = sum(row["last"] for row in rows.values())
    late = milliseconds(rows[rank]["mean_late_s"])
    return f"; it came last in {rows[rank]['share']:.0%} of {seen:,} collectives, {late} after the one before it"


def _ranks(records: list[dict[str, Any]]) -> str:
    *others, last = [str(record["rank"]) for record in records]
    return f"ranks {', '.join(others)} and {last}"
