"""A report's charts as data, one function each; None where a run has nothing to draw."""

from __future__ import annotations

from typing import Any

from clcomm.histogram import Histogram
from clcomm.report import costs
from clcomm.report.facts import PART_KEYS, Facts, per_call, rank_rows, step_parts
from clcomm.report.shapes import Bars, Chart, Distribution, Points
from clcomm.synchronizer import GRADIENTS

_PARTS = ("pack", "wait for ranks", "move and add", "wait or move", "unpack")
_MOST_BINS = 24


def step_chart(facts: Facts) -> Chart | None:
    parts = step_parts(facts)
    if not parts:
        return None
    names, values = zip(*parts, strict=True)
    return Bars("Where a step goes", names, ["a mean step"], [[s * 1e3 for s in values]], "ms")


def _part_bars(
    facts: Facts, title: str, names: list[str], rows: list[dict[str, Any]], suffix: str, note: str
) -> Chart | None:
    keys = [f"{name[:-2]}{suffix}" for name in PART_KEYS]
    shown = [(part, key) for part, key in zip(_PARTS, keys, strict=True) if any(row.get(key) for row in rows)]
    if not facts.several:
        shown = [("communication" if part == _PARTS[2] else part, key) for part, key in shown]
    if not rows or not shown:
        return None
    values = [[(row.get(key) or 0.0) * 1e3 for _, key in shown] for row in rows]
    return Bars(title, [part for part, _ in shown], names, values, "ms", note)


def ranks_chart(facts: Facts) -> Chart | None:
    rows = rank_rows(facts)
    names = [f"rank {row['rank']}" for row in rows]
    return _part_bars(facts, "Synchronising, by rank", names, rows, "_step_s", "a mean step")


def buckets_chart(facts: Facts) -> Chart | None:
    rows = [per_call(row) for row in facts.buckets]
    names = [f"bucket {row['bucket']}" for row in rows]
    return _part_bars(facts, "Reducing, by bucket", names, rows, "_mean_s", "a mean call")


def late_chart(facts: Facts) -> Chart | None:
    late = {row["rank"]: row["share"] * 100 for row in facts.counts["stragglers"]}
    if not late:
        return None
    ranks = [record["rank"] for record in facts.run.ranks]
    values = [[late.get(rank, 0.0)] for rank in ranks]
    return Bars(
        "Who came last", ["came last"], [f"rank {rank}" for rank in ranks], values, "%", "of all collectives that tell"
    )


def distribution(facts: Facts) -> Chart | None:
    tallies = [tally for key, tally in facts.stats.tallies.items() if key[:2] == ("all_reduce", GRADIENTS)]
    row = facts.reductions
    if not row["calls"]:
        return None
    whole = Histogram()
    for tally in tallies:
        whole.merge(tally.histogram)
    edges, counts = whole.coarse(_MOST_BINS)
    marks = [("p50", row["p50_s"]), ("p95", row["p95_s"]), ("p99", row["p99_s"])]
    return Distribution("How long gradient all-reduces took", edges, counts, marks, "calls of all ranks, log scale")


def cost_chart(facts: Facts) -> Chart | None:
    if not isinstance(facts.own_costs, costs.Costs) or facts.own_costs.fit is None:
        return None
    points = facts.own_costs.fit.points
    low, high = min(nbytes for nbytes, _ in points), max(nbytes for nbytes, _ in points)
    sizes = [low * (high / low) ** (i / 24) for i in range(25)]
    line = [(nbytes, float(facts.own_costs.cost.seconds(nbytes))) for nbytes in sizes]
    return Points("Time of an all-reduce by size", points, line, "this run's buckets, and the fit")


ALL = (step_chart, ranks_chart, buckets_chart, late_chart, distribution, cost_chart)
