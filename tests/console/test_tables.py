"""Every table that is printed, at any width: no number is cut, rows keep their names, lines keep to the width.

A sample by default; CLCOMM_TABLE_FAMILY=1 (`make tables`) takes every width from 40 to 200 with values of every length.
"""

from __future__ import annotations

import io
import math
import os
import random
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from clcomm.base.console.table import TextTable
from clcomm.comm.costs.forecast import Candidate, ScalingRow
from clcomm.comm.costs.model import Cost, Fit, MeasuredFit
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.insight.measure.bench import Printer
from clcomm.insight.measure.timing import BenchRow
from clcomm.insight.measure.tune_report import candidates_table, fits_table, scaling_table
from clcomm.insight.report.elements import Column as ReportColumn
from clcomm.insight.report.elements import Table
from clcomm.insight.report.report import show
from clcomm.insight.summary import Layer, ParameterPlace, Summary
from clcomm.tools.commands import devices
from tests.stats_events import event
from training.comparison.outcome import Outcome
from training.comparison.tables import calls_table, times_table
from training.comparison.variants import Variant

WHOLE = os.environ.get("CLCOMM_TABLE_FAMILY") == "1"
WIDTHS = range(40, 201) if WHOLE else (40, 41, 47, 53, 60, 66, 72, 79, 80, 81, 90, 99, 110, 120, 121, 140, 163, 200)
DIGITS = range(1, 16)
NAMES = [["all_reduce", "broadcast"], ["all_reduce gradients", "all_gather_object checks"],
         ["reduce_scatter of a label that goes on and on", "fc"]]  # fmt: skip
#: No digits of words such as p50 and 1/beta.
NUMBER = re.compile(r"(?<![\w.,/])\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?![\d/])")


class Drawn(NamedTuple):
    """A table to print, or what prints it at a width; and what its lines may and have to hold."""

    printed: TextTable | Callable[[int], str]
    names: Sequence[str]
    values: Sequence[float]
    always: Sequence[float]  # values that no width leaves out


def value_of(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


def printed(drawn: Drawn, width: int) -> list[str]:
    """Return the lines without title and notes."""
    if not isinstance(drawn.printed, TextTable):
        return drawn.printed(width).splitlines()
    out = io.StringIO()
    Console(width=width, file=out, highlight=False).print(drawn.printed)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width, (width, lines)
    styles = [line.style for line in drawn.printed.lines(width)]
    assert len(styles) == len(lines)  # Rich has broken none of them
    return [line for line, style in zip(lines, styles, strict=True) if "italic" not in style]


def check(drawn: Drawn, width: int) -> None:
    lines = printed(drawn, width)
    shown = "\n".join(lines)
    assert max(map(len, lines)) <= width, (width, shown)
    assert "…" not in shown
    for name in drawn.names:
        assert all(word in shown for word in name.split()), (name, shown)
        assert len(name) > 24 or name in shown, (name, shown)
    tokens = [token for line in lines for token in NUMBER.findall(line)]
    for token in tokens:
        assert any(equal(token, value) for value in drawn.values), (width, token, shown)
    for value in drawn.always:
        assert any(equal(token, value) for token in tokens), (width, value, shown)


def equal(token: str, value: float) -> bool:
    """Say whether a printed number is a value, to the digits that are printed."""
    number = float(token.replace(",", ""))
    decimals = len(token.partition(".")[2]) if "e" not in token else 0
    if "e" in token:
        return math.isclose(number, value, rel_tol=6e-3)
    return math.isclose(number, value, abs_tol=0.5000001 * 10.0**-decimals, rel_tol=1e-12)


# --- the tables ---


def stats_table(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    stats, values = CommStats(4), [0.0]
    for name in names:
        operation, _, label = name.partition(" ")
        nbytes, seconds = value_of(rng, digits), value_of(rng, digits) / 1e3
        stats.collective_finished(event(seconds, nbytes, operation, label=label))
        values += [1, nbytes, seconds * 1e3, nbytes / seconds / 1e9]
        row = stats.total(operation, label)
        values += [row["p50_s"] * 1e3, row["p95_s"] * 1e3, row["busbw_bytes_per_s"] / 1e9]
    return Drawn(stats.table(), names, values, [1])


def outcomes_of(names: Sequence[str], digits: int, rng: random.Random) -> tuple[list[Outcome], list[float]]:
    outcomes, values = [], []
    for number, name in enumerate([*names, "per tensor"]):
        step_s, total = value_of(rng, digits) / 1e3, value_of(rng, digits)
        row = {"average_bytes_per_call": total, "calls": total + 1, "bytes": total + 2}
        times = np.full(7, step_s)
        outcome = Outcome(
            Variant(name, None, "auto"), (1,) * (number + 1), "shared", SimpleNamespace(), None, times, times / 4,
            np.full(7, 64.0), times / 8,
        )  # fmt: skip
        outcome.__dict__["result"] = SimpleNamespace(stats=SimpleNamespace(total=lambda *_, row=row: row))
        outcomes.append(outcome)
        values += [number + 1, 1e3 * step_s, 1e3 * step_s / 4, 1e3 * step_s / 8, 64 / step_s, 25, *row.values()]
    return outcomes, values


def times(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    outcomes, values = outcomes_of(names, digits, rng)
    last = outcomes[-1].step_s[0]
    ratios = [outcome.step_s[0] / last for outcome in outcomes]
    return Drawn(times_table(outcomes), [*names, "per tensor"], values + ratios, ratios)


def calls(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    outcomes, values = outcomes_of(names, digits, rng)
    first, second = (outcome.result.stats.total() for outcome in outcomes[:2])  # type: ignore[union-attr]
    ratios = [float(f"{first[key] / second[key]:.3g}") for key in first]
    figures = ["Average bytes/call", "Total all-reduce calls", "Total bytes sent"]
    return Drawn(calls_table(*outcomes[:2]), figures, values + ratios, [*first.values(), *second.values()])


def bench(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    rows, values = [], [0.0]
    for name in names:
        nbytes, p50 = value_of(rng, digits), float(value_of(rng, min(digits, 11)))
        figures = (p50 / 2, p50, p50 * 2, nbytes / p50 / 1e3, nbytes / p50 / 2e3)
        rows.append(BenchRow(name, "shared", "shared", nbytes, nbytes // 4, "float", "sum", "numpy", *figures, 0))
        values += [nbytes, nbytes // 4, *figures]

    def show_rows(width: int) -> str:
        out = io.StringIO()
        printer = Printer(Console(width=width, file=out, highlight=False, soft_wrap=True), False)
        for row in rows:
            printer.show([row])
        return out.getvalue()

    return Drawn(show_rows, names, values, [row.p50_us for row in rows])


def fits(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    found, values = [], [1024, 4096, 1, 4]  # sizes are written in KiB
    for name in names:
        cost = Cost(value_of(rng, digits) / 1e6, value_of(rng, min(digits, 9)) / 1024e9)
        found.append(MeasuredFit(name, 2, 1, Fit(cost, 0.25, 0.5, ((1024, 1.0), (4096, 2.0)))))
        values += [2, 25, 50, cost.alpha_s * 1e6, cost.beta_s_per_byte * 1024e9, 1e-9 / cost.beta_s_per_byte]
    always = [each.fit.cost.alpha_s * 1e6 for each in found]
    return Drawn(fits_table(SimpleNamespace(fits=found)), names, values, always)  # type: ignore[arg-type]


def candidates(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    rows = [Candidate(None, (1023,) * number, value_of(rng, digits) / 1e3) for number in (1, 2)]
    found: Any = SimpleNamespace(candidates=rows, best=rows[0])
    seconds = [row.seconds * 1e3 for row in rows]
    return Drawn(candidates_table(found, names[0]), ["per tensor", "recommended"], [1, 2, 1023, *seconds], seconds)


def scaled(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    rows, values = [], [50.0]
    for ranks in (2, 4096):
        seconds = value_of(rng, digits) / 1e3
        parts = {"local_s": seconds / 2, "network_s": seconds / 4, "measured_s": seconds * 2}
        rows.append(ScalingRow(ranks=ranks, hosts=1, busbw_bytes_per_s=1e9, efficiency=0.5, **parts))
        values += [ranks, 1, *(1e3 * each for each in (*parts.values(), rows[-1].predicted_s))]
    return Drawn(scaling_table(rows, with_efficiency=True), [], values, [row.predicted_s * 1e3 for row in rows])


def summary(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    layers, places, values = [], [], []
    for number, name in enumerate(names):
        size, flops = value_of(rng, digits), value_of(rng, digits)
        layers.append(Layer(name, "", (size,), (f"{name}.weight",), flops, 3 * flops))
        places.append(ParameterPlace(f"{name}.weight", (size, 3), size, (number,), number + 5))
        values += [size, 3, flops / 1e6, 3 * flops / 1e6, number, number + 5]
    table = Summary(tuple(layers), tuple(places)).table()
    return Drawn(table, [*names, "weight"], values, [place.size for place in places])


def device_list(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    values = [value_of(rng, digits) for _ in names]
    rows = [
        ("  cpu", name, "Portable", "driver", f"{value}", "GiB", "tuned")
        for name, value in zip(names, values, strict=True)
    ]
    return Drawn(TextTable(devices.COLUMNS, rows, dropped_first=devices._DROPPED_FIRST), names, values, [])


def report(names: Sequence[str], digits: int, rng: random.Random) -> Drawn:
    columns = [ReportColumn("operation", "operation", "text"), ReportColumn("label", "label", "text")]
    columns += [ReportColumn(f"count{number}", "a count") for number in range(4)]
    columns += [ReportColumn(f"ms{number}", "some ms", "ms") for number in range(3)]
    rows, values = [], []
    for name in names:
        operation, _, label = name.partition(" ")
        numbers = [value_of(rng, digits) for _ in range(7)]
        counts = {f"count{number}": numbers[number] for number in range(4)}
        times_ms = {f"ms{number}": numbers[4 + number] / 1e3 for number in range(3)}
        rows.append({"operation": operation, "label": label, **counts, **times_ms})
        values += numbers

    def show_report(width: int) -> str:
        out = io.StringIO()
        made: Any = SimpleNamespace(
            title="", subtitle="", headline=[], tables=[Table("t", "", columns, rows)], left_out=[]
        )
        show(made, Console(width=width, file=out, highlight=False))
        return out.getvalue()

    return Drawn(show_report, [word for name in names for word in name.split()], values, values)


TABLES = [stats_table, times, calls, bench, fits, candidates, scaled, summary, device_list, report]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("draw", TABLES)
def test_numbers_stay_whole_at_every_width(draw: Callable[[Sequence[str], int, random.Random], Drawn]) -> None:
    rng = random.Random(11)
    for names in NAMES:
        for digits in DIGITS:
            drawn = draw(names, digits, rng)
            for width in WIDTHS:
                check(drawn, width)
