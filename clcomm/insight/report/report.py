"""A run's report as plain data: sentences, tables, charts, and omissions with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from clcomm.insight.report import charts, provenance, run_costs, sentences, tables, what_if
from clcomm.insight.report.analysis import Analysis
from clcomm.insight.report.chart_kinds import Chart
from clcomm.insight.report.documents import Record
from clcomm.insight.report.elements import Table
from clcomm.insight.report.reading import Run
from clcomm.insight.report.sentences import Tile
from clcomm.sync.synchronizer import GRADIENTS

#: Version of `clcomm report --format json`.
SCHEMA = 2


class LeftOut(NamedTuple):
    """An omission of the report, and its reason."""

    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """A report for all output formats. Values are seconds, bytes and shares from 0 to 1."""

    title: str
    figures: Record
    tiles: list[Tile]
    headline: list[str]
    tables: list[Table]
    charts: list[Chart]
    left_out: list[LeftOut]
    subtitle: str = ""


def build(run: Run, what_if_too: bool = False) -> Report:
    """Return the report of a run; with what its steps would take without what slows them, if asked."""
    analysis = Analysis(run)
    found = [*(make(analysis) for make in tables.ALL), provenance.provenance_table(run)]
    headline = sentences.headline(analysis)
    if what_if_too:
        found.insert(0, what_if.table(analysis))
        headline += [line for line in [what_if.sentence(analysis)] if line]
    drawn = [make(analysis) for make in charts.ALL]
    return Report(
        sentences.title(analysis),
        {name: value for name, value in run.figures.items() if not isinstance(value, list)},
        sentences.tiles(analysis),
        headline,
        [table.filled() for table in found if table.rows],
        [chart for chart in drawn if chart is not None],
        left_out(analysis),
        provenance.subtitle(run),
    )


def left_out(analysis: Analysis) -> list[LeftOut]:
    """Return the omissions with their reasons and remedies."""
    unfit = run_costs.unfit(analysis.buckets)
    several, not_reported = analysis.run.world_size > 1, "this transport does not report"
    background = " for background all-reduces; --overlap off shows them" if analysis.reducing["hidden_s"] else ""
    command = f"mpiexec -n {analysis.run.world_size} clcomm tune{f' --sums {analysis.sums}' if analysis.sums else ''}"
    candidates = [
        (
            bool(analysis.stats.total("reduce_scatter", GRADIENTS)["calls"]),
            "gradient all-reduce, buckets",
            "a sharded update reduces and scatters all gradients at once",
        ),
        (
            bool(analysis.reductions["calls"]) and not analysis.buckets,
            "buckets",
            "the run ended while bucket sizes were still being tried, or reduced gradients without a Synchronizer",
        ),
        (not analysis.training_s, "share of a step", "the files do not hold the time of the steps"),
        (
            several and analysis.reducing["wait_unknown_s"] > 0,
            "wait for ranks",
            f"{not_reported} waiting and moving data separately{background}",
        ),
        (
            several and not analysis.counts["stragglers"],
            "who came last",
            f"{not_reported} the last rank",
        ),
        (several and isinstance(analysis.own_costs, str), "latency and bandwidth of this run", str(analysis.own_costs)),
        (
            several and not analysis.ceiling,
            "percent of the ceiling",
            f"{analysis.no_ceiling}; `{command}` measures such calls",
        ),
        (not analysis.layout, "other bucket sizes", "the files do not hold the bucket plan"),
        (several and bool(analysis.layout and analysis.costs and unfit), "other bucket sizes", unfit),
    ]
    return [LeftOut(what, why) for is_missing, what, why in candidates if is_missing]
