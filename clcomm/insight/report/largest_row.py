"""Causes of a step's length: its largest part, and long evaluations or compression beside the steps."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

from clcomm.base.units import format_size
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.insight.report.analysis import Analysis, mean_step_by_rank
from clcomm.insight.report.elements import milliseconds, written
from clcomm.insight.report.step_parts import (
    COMPUTING,
    COMPUTING_TOO,
    CORE,
    DATA,
    DEVICE,
    EITHER,
    OPTIMIZER,
    PACK,
    REST,
    UNPACK,
    WAIT,
    own_phases,
    reducing,
)
from clcomm.sync.clipping import CLIPPING

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
