"""A run's report as plain data: sentences, tables, charts, and what had to be left out and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from clcomm.report import charts, costs, provenance, sentences, tables
from clcomm.report.facts import Facts
from clcomm.report.reading import Run
from clcomm.report.sentences import Tile
from clcomm.report.shapes import Chart, Table
from clcomm.synchronizer import GRADIENTS

#: Version of `clcomm report --format json`.
SCHEMA = 1


class LeftOut(NamedTuple):
    """Something the report does not show, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """What all renderers write. Values are seconds, bytes and shares from 0 to 1."""

    title: str
    figures: dict[str, Any]
    tiles: list[Tile]
    headline: list[str]
    tables: list[Table]
    charts: list[Chart]
    left_out: list[LeftOut]
    subtitle: str = ""


def build(run: Run) -> Report:
    """Return the report of a run."""
    facts = Facts(run)
    found = [*(make(facts) for make in tables.ALL), provenance.provenance_table(run)]
    drawn = [make(facts) for make in charts.ALL]
    return Report(
        sentences.title(facts),
        {name: value for name, value in run.figures.items() if not isinstance(value, list)},
        sentences.tiles(facts),
        sentences.headline(facts),
        [table.filled() for table in found if table.rows],
        [chart for chart in drawn if chart is not None],
        left_out(facts),
        provenance.subtitle(run),
    )


def left_out(facts: Facts) -> list[LeftOut]:
    """Return what could not be shown, with the reason and what to do about it."""
    unfit = costs.unfit(facts.buckets)
    several, mute = facts.run.world_size > 1, "this transport does not tell"
    background = " in what goes on in the background; --overlap off does" if facts.reducing["hidden_s"] else ""
    command = f"mpiexec -n {facts.run.world_size} clcomm tune{f' --sums {facts.sums}' if facts.sums else ''}"
    candidates = [
        (
            bool(facts.stats.total("reduce_scatter", GRADIENTS)["calls"]),
            "gradient all-reduce, buckets",
            "a sharded update reduces and scatters all gradients at once",
        ),
        (
            bool(facts.reductions["calls"]) and not facts.buckets,
            "buckets",
            "the run ended while bucket sizes were still being tried, or reduced gradients without a Synchronizer",
        ),
        (not facts.training_s, "share of a step", "the files do not say how long the steps took"),
        (
            several and facts.reducing["untold_s"] > 0,
            "wait for ranks",
            f"{mute} waiting from moving data{background}",
        ),
        (
            several and not facts.counts["stragglers"],
            "who came last",
            f"{mute} which rank it was",
        ),
        (several and isinstance(facts.own_costs, str), "latency and bandwidth of this run", str(facts.own_costs)),
        (
            several and not facts.ceiling,
            "percent of the ceiling",
            f"{facts.no_ceiling}; `{command}` measures such calls",
        ),
        (not facts.layout, "other bucket sizes", "the files do not hold the bucket plan"),
        (several and bool(facts.layout and facts.costs and unfit), "other bucket sizes", unfit),
    ]
    return [LeftOut(what, why) for missing, what, why in candidates if missing]
