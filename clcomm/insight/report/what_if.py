"""What a run's steps would take without one of the things that slow them down.

The ranks' mean steps are replayed: each rank computes, waits for the last one, and moves data with it. So a step
shortens by as much as its slowest rank does. A rank that is late in some steps only is told by the collectives to
which it came last: the others lost what it came later than the rank before it, less what other ranks come late as well.
(Lin et al., "Understanding stragglers in large model training using what-if analysis", OSDI 2025, replay traces so.)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from clcomm.base.units import format_size
from clcomm.insight.report.elements import Column, Table, count, milliseconds
from clcomm.insight.report.run_costs import Analysis, mean_step_by_rank
from clcomm.insight.report.step_parts import CORE, DATA, EITHER, WAIT

#: What saves less than this share of a step is left out.
_NOTABLE = 0.01
_COLUMNS = (
    Column("change", "without, or with", "text"), Column("step_s", "step", "ms"), Column("saved_s", "saved", "ms"),
    Column("saved_share", "saved", "share"),
)  # fmt: skip


class WhatIf(NamedTuple):
    """A change in words that go on from "the steps would take ...", and the seconds of a mean step that it saves."""

    change: str
    saved_s: float


def what_ifs(analysis: Analysis) -> list[WhatIf]:
    """Return the changes that save a notable part of a step, the largest first; [] if steps were not timed."""
    step_s = analysis.per_step(analysis.training_s)
    if not step_s:
        return []
    found = [
        *_stragglers(analysis), _without(analysis, "without waits for data", lambda rank, parts: parts.get(DATA, 0.0)),
        _without(analysis, "with a core for each rank", lambda rank, parts: parts.get(CORE, 0.0)),
        _without(analysis, "without Python and launches", _launches(analysis)), *_network(analysis),
    ]  # fmt: skip
    notable = [each for each in found if each.saved_s >= _NOTABLE * step_s]
    return sorted(notable, key=lambda each: -each.saved_s)


def table(analysis: Analysis) -> Table:
    """Return each change with the step that it leaves."""
    step_s = analysis.per_step(analysis.training_s) or 0.0
    rows = [
        {"change": change, "step_s": step_s - saved_s, "saved_s": saved_s, "saved_share": saved_s / step_s}
        for change, saved_s in what_ifs(analysis)
    ]
    note = f"Of a mean step of {milliseconds(step_s)}. Each change is alone: what they save does not add up."
    return Table("what_if", "What if", _COLUMNS, rows, note)


def sentence(analysis: Analysis) -> str:
    """Return what the largest change would save of the run; "" for none."""
    found, whole_s = what_ifs(analysis), analysis.training_s or 0.0
    if not found or not analysis.steps:
        return ""
    best, steps = found[0], round(analysis.steps)
    left_s = whole_s - best.saved_s * analysis.steps
    begin = best.change[0].upper() + best.change[1:]
    return f"{begin} {count(steps, 'step')} would take {milliseconds(left_s)}, not {milliseconds(whole_s)}."


def _own(analysis: Analysis) -> dict[int, dict[str, float]]:
    """Return each rank's parts of a mean step that are its own, by rank."""
    ranks = [record["rank"] for record, _ in analysis.warm]
    return {
        rank: {name: seconds for name, seconds in parts.items() if name not in (WAIT, EITHER)}
        for rank, parts in zip(ranks, mean_step_by_rank(analysis), strict=True)
    }


def _without(analysis: Analysis, change: str, less: Callable[[int, Mapping[str, float]], float]) -> WhatIf:
    """Return what the slowest rank saves if each rank's step were shorter by `less`."""
    own = _own(analysis)
    wholes = {rank: sum(parts.values()) for rank, parts in own.items()}
    left = {rank: whole - min(whole, less(rank, own[rank])) for rank, whole in wholes.items()}
    return WhatIf(change, max(wholes.values()) - max(left.values()))


def _launches(analysis: Analysis) -> Callable[[int, Mapping[str, float]], float]:
    measured = {record["rank"]: record["launch_step_s"] or 0.0 for record in analysis.run.ranks}
    return lambda rank, parts: measured[rank]


def _stragglers(analysis: Analysis) -> list[WhatIf]:
    """Return what others lose by each rank, beyond what they lose by any of them.

    Where the transport does not tell who came last it is the slowest rank's mean step beyond the median of the others'.
    """
    if not analysis.several or len(analysis.warm) < 2:
        return []
    late = _late_s(analysis)
    if late:
        return [
            WhatIf(f"without rank {rank}'s delay", late[rank] - statistics.median(_others(late, rank))) for rank in late
        ]
    wholes = {rank: sum(parts.values()) for rank, parts in _own(analysis).items()}
    slow = max(wholes, key=wholes.__getitem__)
    usual = statistics.median(_others(wholes, slow))
    return [WhatIf(f"without rank {slow}'s delay", max(wholes.values()) - max(usual, *_others(wholes, slow)))]


def _others(values: Mapping[int, float], rank: int) -> list[float]:
    return [value for other, value in values.items() if other != rank]


def _late_s(analysis: Analysis) -> dict[int, float]:
    """Return by rank how long the ranks of a mean step waited for it alone; {} where nobody knows who came last."""
    rows = [{row["rank"]: row["late_s"] for row in stats.as_dict()["stragglers"]} for _, stats in analysis.warm]
    if not any(rows) or not analysis.steps:
        return {}
    ranks = [record["rank"] for record in analysis.run.ranks]
    return {rank: statistics.mean(row.get(rank, 0.0) for row in rows) / analysis.steps for rank in ranks}


def _network(analysis: Analysis) -> list[WhatIf]:
    """Return what other buckets and twice the bandwidth save, where the cost of a call and of a byte are known."""
    if analysis.advice is None or analysis.costs is None:
        return []
    advice, beta = analysis.advice, analysis.costs.cost.beta_s_per_byte
    best = advice.recommendation.best
    size = "no bucketing" if best.bucket_size is None else f"buckets of {format_size(best.bucket_size)}"
    nbytes = sum(map(sum, analysis.layout))
    return [
        WhatIf(f"with {size}", advice.current_s - best.seconds),
        WhatIf("with twice the bandwidth", 0.5 * beta * nbytes),
    ]
