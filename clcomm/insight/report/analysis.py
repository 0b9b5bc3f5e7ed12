"""Sums, means and shares of a run, shared by a report's sections."""

from __future__ import annotations

from collections.abc import Sequence

from clcomm.comm.stats.comm_stats import MOST_TALLIES
from clcomm.comm.stats.events import Row
from clcomm.insight.report import run_costs
from clcomm.insight.report.documents import Record
from clcomm.insight.report.reading import Run
from clcomm.insight.report.step_parts import OFTEN, PART_KEYS, moving, parts_of, reducing, synchronisation
from clcomm.insight.report.warm_steps import warm
from clcomm.sync.synchronizer import GRADIENTS


class Analysis:
    """A run's figures for the sections, computed once; of an average rank unless stated otherwise."""

    def __init__(self, run: Run):
        self.run = run
        self.stats = run.stats()
        self.counts = self.stats.as_dict()
        self.by_rank = [(record, run.stats([record])) for record in run.ranks]
        self.buckets = [row for row in self.counts["buckets"] if row["label"] == GRADIENTS]
        self.reductions = self.stats.total("all_reduce", GRADIENTS)
        #: Each rank's record and stats without its first steps, for means, shares and causes.
        self.warm = [warm(record, stats) for record, stats in self.by_rank]
        self.all_steps, self.all_training_s = _mean_value(run.ranks, "steps"), _mean_value(run.ranks, "training_s")
        warm_records = [record for record, _ in self.warm]
        self.steps, self.training_s = _mean_value(warm_records, "steps"), _mean_value(warm_records, "training_s")
        self.data_wait_s = _mean_value(warm_records, "data_wait_s")
        self.several = run.world_size > 1
        self.compressed = any(row["wire_bytes"] != row["bytes"] for row in self.counts["operations"])
        self.moving = moving(self.several, self.compressed)
        last = {row["rank"]: row["share"] for row in self.counts["stragglers"]}
        mostly = {rank: share for rank, share in last.items() if share >= max(0.5, OFTEN / run.world_size)}
        self.parts = [
            parts_of(record, stats, self.moving, mostly.get(record["rank"], 0.0)) for record, stats in self.warm
        ]
        self.reducing = _mean_of([reducing(stats) for _, stats in self.warm])
        self.sync = _mean_of([synchronisation(stats) for _, stats in self.warm])
        self.overflows = len(self.stats.tallies) >= MOST_TALLIES
        self.sums = run.ranks[0]["sums"]
        ceiling = run_costs.ceiling_of(run.figures["ceilings"], self.reductions["transport"], self.sums)
        if any(row["part"] and row["label"] == GRADIENTS for row in self.counts["operations"]):
            ceiling = "gradients were reduced on a part of the ranks"
        self.ceiling = None if isinstance(ceiling, str) else ceiling
        self.no_ceiling = ceiling or "no such calls were measured on rank 0's host before"
        self.own_costs = run_costs.own_costs(self.buckets)
        self.costs = self.own_costs if isinstance(self.own_costs, run_costs.Costs) else self.stored_costs()
        layout = [bucket for bucket in run.figures["layout"] or [] if bucket]
        self.layout = layout
        can_predict = layout and self.buckets and not run_costs.unfit(self.buckets)
        self.advice = run_costs.advise(self.costs, layout) if self.costs and can_predict else None

    @property
    def cold_steps(self) -> int:
        """The steps at the start of the run that means, shares and causes leave out."""
        return round((self.all_steps or 0) - (self.steps or 0))

    def stored_costs(self) -> run_costs.Costs | None:
        """Return the costs that `clcomm tune` measured on this host; None if there are none that apply."""
        return run_costs.Costs(self.ceiling, "measured by `clcomm tune` on this host") if self.ceiling else None

    @property
    def sync_s(self) -> float:
        """Seconds of the steps, without the first, spent synchronising the replicas."""
        return self.sync["pack_s"] + self.sync["exposed_s"] + self.sync["unpack_s"]

    @property
    def sync_share(self) -> float | None:
        """`sync_s` as a share, 0 to 1, of the time of these steps; None if steps were not timed."""
        return self.sync_s / self.training_s if self.training_s else None

    def per_step(self, seconds: float | None) -> float | None:
        """Return a time of the steps without the first divided by their number; None if either is not known."""
        return seconds / self.steps if self.steps and seconds is not None else None


def _mean_value(records: Sequence[Record], name: str) -> float | None:
    values = [record[name] for record in records]
    return None if None in values else sum(values) / len(values)


def _mean_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def mean_step(analysis: Analysis) -> list[tuple[str, float]]:
    """Return the parts of a mean step in seconds, in order; [] if steps were not timed."""
    if not analysis.training_s or not analysis.steps:
        return []
    names = dict.fromkeys(name for parts in analysis.parts for name in parts)
    totals = {name: sum(parts.get(name, 0.0) for parts in analysis.parts) / len(analysis.parts) for name in names}
    return [(name, seconds / analysis.steps) for name, seconds in totals.items() if seconds > 0]


def mean_step_by_rank(analysis: Analysis) -> list[dict[str, float]]:
    """Return each rank's parts of its mean step in seconds, by name; `mean_step` has their means."""
    shown = [name for name, _ in mean_step(analysis)]
    return [
        {name: parts.get(name, 0.0) / record["steps"] for name in shown} if parts else {}
        for (record, _), parts in zip(analysis.warm, analysis.parts, strict=True)
    ]


def rank_rows(analysis: Analysis) -> list[Row]:
    """Return a row for each rank: its host, its time, its memory, and how often and how far it came last."""
    stragglers = {row["rank"]: row for row in analysis.counts["stragglers"]}
    rows = []
    for (record, stats), (warm_record, _) in zip(analysis.by_rank, analysis.warm, strict=True):
        training_s, cpu_s = record["training_s"], record["cpu_s"]
        straggler = stragglers.get(record["rank"], {"last": 0, "share": 0.0, "mean_late_s": None})
        rows.append({
            "rank": record["rank"], "host_name": record["host_name"], "cpus": record["cpus"], "steps": record["steps"],
            "step_s": _step_s(warm_record),
            "cpu_share": cpu_s / training_s if training_s and cpu_s is not None else None,
            "last": straggler["last"] if stragglers else None,
            "last_share": straggler["share"] if stragglers else None, "mean_late_s": straggler["mean_late_s"],
            "failures": sum(t.failures for t in stats.tallies.values()),
            "peak_rss_bytes": record["peak_rss_bytes"], "device_peak_bytes": record["device_peak_bytes"],
        })  # fmt: skip
    return rows


def _step_s(record: Record) -> float | None:
    steps, training_s = record["steps"], record["training_s"]
    return training_s / steps if steps and training_s is not None else None


def hidden_by_rank_s(analysis: Analysis) -> list[float]:
    """Return the seconds of communication hidden behind each rank's mean step."""
    return [
        synchronisation(stats)["hidden_s"] / record["steps"] if record["steps"] else 0.0
        for record, stats in analysis.warm
    ]


def per_call(row: Row) -> Row:
    """Return a bucket's row with the parts of a mean call added, under names that end in mean_s."""
    calls = row["calls"] or 1
    return {**row, **{f"{name[:-2]}_mean_s": row[name] / calls for name in (*PART_KEYS, "hidden_s")}}
