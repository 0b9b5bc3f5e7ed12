"""The output of a comparison: LizarDist's table, then times with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.comm.costs.estimates import METHOD, Estimate, estimate
from clcomm.comm.costs.model import Fit
from clcomm.insight.report.record import COMPARISON_FORMAT, COMPARISON_SCHEMA
from clcomm.sync.synchronizer import GRADIENTS
from training.comparison.outcome import Outcome, Timing, reference_of


def calls_table(first: Outcome, second: Outcome) -> TextTable:
    """Return LizarDist's table: gradient all-reduces of two runs as each rank counts them, and the ratio."""
    totals = [outcome.result.stats.total("all_reduce", GRADIENTS) for outcome in (first, second)]
    rows = []
    for name, key, form in (
        ("Average bytes/call", "average_bytes_per_call", "{:,.0f}"),
        ("Total all-reduce calls", "calls", "{:,}"),
        ("Total bytes sent", "bytes", "{:,}"),
    ):
        mine, theirs = (total[key] for total in totals)
        ratio = f"{mine / theirs:.3g}x" if theirs else "-"
        rows.append((name, form.format(mine), form.format(theirs), ratio))
    headings = first.variant.name, second.variant.name, "ratio"
    columns = [TextColumn("", right=False), *map(TextColumn, headings)]
    return TextTable(columns, rows, title="Gradient all-reduce, per rank", dropped_first=["ratio"])


def times_table(outcomes: Sequence[Outcome]) -> TextTable:
    """Return a row for each variant: its step, its collectives and its speed, with intervals and ratios."""
    reference = reference_of(outcomes)
    timings = [(outcome, outcome.timing(reference)) for outcome in outcomes]
    columns = [TextColumn("", right=False), *(TextColumn(heading) for heading, _ in _COLUMNS)]
    rows = [[outcome.variant.name, *(write(outcome, timing) for _, write in _COLUMNS)] for outcome, timing in timings]
    return TextTable(columns, rows, title="Time", note=caption(outcomes), dropped_first=_DROPPED_FIRST)


def caption(outcomes: Sequence[Outcome]) -> str:
    """Return how the times were measured."""
    windows = len(outcomes[0].step_s)
    few = "" if outcomes[0].timing(outcomes[0]).step_s.has_interval else "; too few windows for intervals"
    return f"medians over {windows} windows, taken in turns; in brackets the {METHOD}{few}"


def alone(outcomes: Sequence[Outcome]) -> str:
    """Return a line on the first two variants' reductions alone, in which no rank waits for one that computes.

    It is empty if they were not measured.
    """
    first, second = outcomes[:2]
    times = estimate(second.alone_s / first.alone_s)
    if math.isnan(times.median):
        return ""
    return (
        f"alone, a step's reductions with nothing between them: {second.variant.name} takes "
        f"{times.text(1)} times as long as {first.variant.name}"
    )


Write = Callable[[Outcome, Timing], str]
_COLUMNS: tuple[tuple[str, Write], ...] = (
    ("buckets", lambda outcome, timing: str(len(outcome.buckets))),
    ("via", lambda outcome, timing: outcome.moved_by),
    ("step ms", lambda outcome, timing: _milliseconds(timing.step_s)),
    ("x per tensor", lambda outcome, timing: timing.ratio.text(2)),
    ("comm ms", lambda outcome, timing: _milliseconds(timing.communication_s)),
    ("share", lambda outcome, timing: _or_dash(timing.communication_share, ".1%")),
    ("alone ms", lambda outcome, timing: _or_dash(timing.alone_s.median * 1e3, ".3f")),
    ("images/s", lambda outcome, timing: _or_dash(timing.images_per_s.median, ",.0f")),
)
#: Columns to leave out, in this order, where the terminal is too narrow.
_DROPPED_FIRST = ("via", "share", "images/s", "buckets", "comm ms", "alone ms", "step ms")


def _milliseconds(found: Estimate) -> str:
    """Return a time with as many digits as the table has room for."""
    return found.scaled(1e3).text(3 if found.median < 0.001 else 2 if found.median < 0.1 else 0)


def _or_dash(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def same_parameters(outcomes: Sequence[Outcome]) -> str:
    """Return a line on whether all runs ended with the same parameters, bit for bit, as they should."""
    first, *others = [outcome.session.parts.model.state_dict() for outcome in outcomes]
    for state, outcome in zip(others, outcomes[1:], strict=True):
        different = [name for name in first if not np.array_equal(_bits(first[name]), _bits(state[name]))]
        if different:
            mine, theirs = outcomes[0].variant.name, outcome.variant.name
            return f"the parameters of {mine} and {theirs} differ, first in {different[0]}"
    both = "both" if len(outcomes) == 2 else f"all {len(outcomes)}"
    return f"{both} runs ended with the same parameters, bit for bit"


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


def as_report(outcomes: Sequence[Outcome], costs: Mapping[str, Fit], dataset: str) -> dict[str, Any]:
    """Return the comparison as the JSON of --report; docs/reports.md names its fields.

    `costs` has a fit for each transport, for the chart's curves.
    """
    reference = reference_of(outcomes)
    return {
        "format": COMPARISON_FORMAT,
        "schema": COMPARISON_SCHEMA,
        "intervals": METHOD,
        "windows": len(reference.step_s),
        "reference": reference.variant.name,
        "variants": {outcome.variant.name: _figures(outcome, reference) for outcome in outcomes},
        "costs": {name: asdict(fitted.cost) for name, fitted in costs.items()},
        "runs": {
            outcome.variant.name: outcome.result.as_report(outcome.session.options, outcome.session.comm, dataset)
            for outcome in outcomes
        },
    }


def _figures(outcome: Outcome, reference: Outcome) -> dict[str, Any]:
    timing = outcome.timing(reference)
    estimates: dict[str, Estimate] = {
        "step_ms": timing.step_s.scaled(1e3),
        "communication_ms": timing.communication_s.scaled(1e3),
        "images_per_s": timing.images_per_s,
        "step_ratio": timing.ratio,
        "alone_ms": timing.alone_s.scaled(1e3),
        "alone_ratio": timing.alone_ratio,
    }
    return {
        "transport": outcome.variant.transport,
        "overlap": outcome.variant.overlap,
        "moved_by": outcome.moved_by,
        "bucket_size": outcome.bucket_size,
        "buckets": list(outcome.buckets),
        **{name: None if math.isnan(each.median) else each.as_dict() for name, each in estimates.items()},
    }
