"""Causes of a step's length: slow ranks and the slow part, shortage of cores, and the largest part."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

from clcomm.base.units import format_size
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.stats.cores import parse_cpus
from clcomm.insight.report.documents import Record
from clcomm.insight.report.elements import milliseconds, written
from clcomm.insight.report.run_costs import Analysis, mean_step_by_rank
from clcomm.insight.report.step_parts import (
    COMPUTING,
    COMPUTING_TOO,
    CORE,
    DATA,
    DEVICE,
    EITHER,
    OFTEN,
    OPTIMIZER,
    PACK,
    REST,
    UNPACK,
    WAIT,
    own_phases,
    reducing,
)
from clcomm.sync.clipping import CLIPPING

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


# --- Causes of a step's length: its largest part, and long evaluations or compression beside the steps. ---

#: Evaluations and compression are a cause if they take at least this share of the time of the steps.
_NOTABLE = 0.1
#: Phases of an evaluation: its own work, if it is told apart, and the whole, in which ranks wait for each other.
_EVALUATION = "predict", "evaluate"
#: The contents of each part, and remedies.
_MEANING = {
    DATA: "waiting for data: the loader is slow{everywhere}; load ahead, or make batches cheaper",
    DEVICE: "waiting for the device, whose kernels run until then",
    OPTIMIZER: "the optimizer",
    CLIPPING: "clipping gradients",
    CORE: "waiting for a core, which other processes or ranks have",
    PACK: "packing gradients into buckets",
    UNPACK: "unpacking gradients from buckets",
    WAIT: "waiting for other ranks",
    EITHER: "waiting for other ranks or moving data, not known which",
    REST: "the rest: Python between the parts, such as logging, callbacks and schedules",
}


class Cause(NamedTuple):
    """A sentence, and the seconds of a mean step that it explains.

    rank: the rank that it names, -1: none. explained: parts that follow from it.
    """

    sentence: str
    seconds: float
    rank: int = -1
    explained: frozenset[str] = frozenset()


def largest_row(analysis: Analysis, others: Sequence[Cause]) -> Cause | None:
    """Return the part that takes most of a mean step, without the ranks and parts that other causes explain."""
    explained = frozenset[str]().union(*(cause.explained for cause in others))
    slow = {cause.rank for cause in others}
    ranks = [
        parts
        for (record, _), parts in zip(analysis.warm, mean_step_by_rank(analysis), strict=True)
        if record["rank"] not in slow and parts
    ]
    names = dict.fromkeys(name for parts in ranks for name in parts)
    means = {name: statistics.mean(parts.get(name, 0.0) for parts in ranks) for name in names}
    name = max((each for each in means if each not in explained), key=means.__getitem__, default="")
    if not name:
        return None
    share = means[name] / (sum(means.values()) or 1.0)
    larger = [each for each in means if means[each] > means[name]]
    begin = f"Besides {' and '.join(larger)}, the" if larger else "The"
    meaning = _meaning(analysis, name, means[name])
    return Cause(f"{begin} largest part of a step is {meaning}: {milliseconds(means[name])}, {share:.0%}.", means[name])


def _meaning(analysis: Analysis, name: str, seconds: float) -> str:
    if name in (COMPUTING, COMPUTING_TOO):
        return _computing(analysis, name, seconds)
    if name == analysis.moving:
        return "compressing, moving and adding gradients" if analysis.compressed else "moving and adding gradients"
    return _MEANING.get(name, name).format(everywhere=" on every rank" if analysis.several else "")


def _computing(analysis: Analysis, name: str, seconds: float) -> str:
    """Return whether kernels or Python dominate a rank's computing, if measured."""
    values = [record["kernel_step_s"] for record in analysis.run.ranks]
    if None in values:
        return name
    kernels_s = statistics.mean(values)
    if 2 * kernels_s < seconds:
        batch = analysis.run.figures["batch_size"]
        remedy = f"; a larger batch than {batch} shares them among more samples" if batch else ""
        return f"Python and launches in {name}, with {milliseconds(kernels_s)} of kernels a step{remedy}"
    return f"the kernels of {name}"


def compression(analysis: Analysis, slow: Collection[int]) -> Cause | None:
    """Return a cause if compressed gradients take longer than they would uncompressed.

    slow: ranks named by another cause, whose time is theirs alone.
    """
    moved = [reducing(stats)["transfer_s"] for record, stats in analysis.warm if record["rank"] not in slow]
    moved_s = analysis.per_step(statistics.mean(moved)) if moved else None
    step_s = analysis.per_step(analysis.training_s)
    calls = [row for row in analysis.buckets if row["calls"]]
    if not (analysis.compressed and analysis.several and moved_s and step_s and analysis.steps and calls):
        return None
    if analysis.ceiling is None or moved_s < _NOTABLE * step_s:
        return _in_memory(analysis, moved_s, step_s)
    plain_s = sum(analysis.ceiling.seconds(row["bytes"] / row["calls"]) for row in calls)
    if moved_s <= plain_s:
        return None
    return _of_compression(analysis, moved_s, f", and without it they would take {milliseconds(plain_s)}")


def _in_memory(analysis: Analysis, moved_s: float, step_s: float) -> Cause | None:
    """Return the cause on one host, where ranks read gradients in place and compression saves no bytes."""
    hosts = {record["host"] for record in analysis.run.ranks}
    if len(hosts) > 1 or moved_s < _NOTABLE * step_s:
        return None
    return _of_compression(analysis, moved_s, ", and the ranks of one host need no bytes on a wire")


def _of_compression(analysis: Analysis, moved_s: float, why: str) -> Cause:
    calls = analysis.steps or 1.0
    reduced = sum(row["bytes"] for row in analysis.buckets) / calls
    sentence = (
        f"Compression costs more than it saves: compressing, moving and adding {format_size(round(reduced))} of "
        f"gradients takes {milliseconds(moved_s)} of a step{why}; --compression none."
    )
    return Cause(sentence, moved_s, explained=frozenset({analysis.moving}))


def _evaluating_s(stats: CommStats) -> float:
    own = own_phases(stats)
    return next((own[name] for name in _EVALUATION if name in own), 0.0)


def evaluation(analysis: Analysis) -> Cause | None:
    """Return a cause if evaluations take long beside the steps, on all ranks or on one."""
    rows = {record["rank"]: _evaluating_s(stats) for record, stats in analysis.by_rank}
    steps, training_s = analysis.all_steps, analysis.all_training_s
    if not (steps and training_s and any(rows.values())):
        return None
    slow = max(rows, key=rows.__getitem__)
    others_s = statistics.median([seconds for rank, seconds in rows.items() if rank != slow] or [rows[slow]])
    if rows[slow] - others_s > _NOTABLE * training_s:
        return Cause(
            f"Rank {slow} keeps the others waiting in evaluations: they take it {written(rows[slow], 'time')} in all, "
            f"the others {written(others_s, 'time')}.",
            (rows[slow] - others_s) / steps,
            slow,
        )
    mean_s = statistics.mean(rows.values())
    if mean_s < _NOTABLE * (mean_s + training_s):
        return None
    return Cause(
        f"Evaluations took {written(mean_s, 'time')} in all, beside {written(training_s, 'time')} of steps: evaluate "
        "less often, or fewer samples.",
        mean_s / steps,
    )
