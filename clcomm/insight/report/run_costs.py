"""Latency and bandwidth from a run's calls or from `clcomm tune`, and the bucket size that follows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.costfile import SUMMED_BY
from clcomm.comm.costs.forecast import Candidate, Recommendation, recommend
from clcomm.comm.costs.model import Bytes, Cost, Fit, fit
from clcomm.comm.stats.comm_stats import MOST_TALLIES, CommStats
from clcomm.comm.stats.events import Row
from clcomm.insight.report.documents import Record
from clcomm.insight.report.recording import Run
from clcomm.insight.report.step_parts import OFTEN, PART_KEYS, moving, parts_of, reducing, synchronisation
from clcomm.sync.synchronizer import GRADIENTS

#: Requirements of a fit: different sizes, the ratio of the largest to the smallest, calls of each size.
_LEAST_SIZES, _LEAST_SPREAD, _LEAST_CALLS = 4, 4, 10
#: Student's t for 95% on both sides, by degrees of freedom from 1 up; the last, slightly too large, for all beyond.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
#: The median error from which a fit is unreliable.
DOUBTFUL = 0.3
#: Predictions within this ratio count as equal.
ALIKE = 1.05


@dataclass(frozen=True)
class MeasuredCost(Cost):
    """A cost, and measured seconds of some sizes in bytes, which count instead; of others NaN where it is NaN."""

    times: Mapping[int, float]

    def seconds(self, nbytes: Bytes) -> Bytes:
        found = self.times.get(nbytes) if isinstance(nbytes, int) else None
        return super().seconds(nbytes) if found is None else found


class Costs(NamedTuple):
    """The cost of a call and its source; `fit` is set where it was fitted to this run's calls."""

    cost: Cost
    source: str
    fit: Fit | None = None


class Advice(NamedTuple):
    """The compared bucket sizes, and this run's plan."""

    recommendation: Recommendation
    current_s: float
    current_buckets: int

    @property
    def is_good(self) -> bool:
        """Whether no other size is predicted to be notably faster."""
        return self.current_s <= ALIKE * self.recommendation.best.seconds


def own_costs(rows: list[Row]) -> Costs | str:
    """Return the fit to a run's reductions, given their buckets' rows, or the reason for none."""
    if not rows:
        return "there are no buckets to fit it to"
    if reason := unfit(rows):
        return reason
    points = measured(rows)
    sizes = [nbytes for nbytes, _ in points]
    if not sizes:
        return f"it needs buckets of several sizes that were reduced {_LEAST_CALLS} times or more"
    if len(set(sizes)) < _LEAST_SIZES:
        return (
            f"it needs buckets of {_LEAST_SIZES} different sizes or more, this run had {len(set(sizes))}; "
            "a smaller --bucket-size, or --no-bucketing, has more"
        )
    if max(sizes) < _LEAST_SPREAD * min(sizes):
        return "all buckets of this run are of about one size; a smaller --bucket-size, or --no-bucketing, has several"
    try:
        found = fit(points)
    except ArgumentError as error:
        return str(error)
    if found.median_error > DOUBTFUL:
        share = f"{found.median_error:.0%}"
        return f"time does not follow size: half of the buckets differ from the fit by {share} or more"
    if found.cost.beta_s_per_byte <= _slope_error(found):
        return "time does not follow size: a byte's cost does not differ from zero with 95% confidence"
    return Costs(found.cost, "fitted to this run's buckets", found)


def measured(rows: list[Row]) -> list[tuple[int, float]]:
    """Return bytes and mean seconds of a call of each bucket that was reduced often enough."""
    usable = [row for row in rows if row["calls"] >= _LEAST_CALLS and row["bytes"]]
    points = [(round(row["average_bytes_per_call"]), moving_s(row)) for row in usable]
    return [(nbytes, seconds) for nbytes, seconds in points if seconds > 0]


def own_times(rows: list[Row]) -> dict[int, float]:
    """Return the mean seconds of a call by its bytes; {} where these times do not predict others."""
    points = [] if unfit(rows) else measured(rows)
    return {size: statistics.fmean(s for nbytes, s in points if nbytes == size) for size, _ in points}


def unfit(rows: list[Row]) -> str:
    """Return the reason why these reductions' times do not predict others; "" if they do."""
    if any(row["hidden_s"] for row in rows):
        return "all-reduces overlapped with computing, which makes them longer; --overlap off shows what they cost"
    if any(row["wire_bytes"] != row["bytes"] for row in rows):
        return "gradients were compressed, so time is not the transport's alone; --compression none shows what it costs"
    return ""


def _slope_error(found: Fit) -> float:
    """Return half the 95% interval of beta, in seconds a byte, from the fit's relative residuals."""
    sizes, times = np.array(found.points, np.float64).T
    predicted = found.cost.seconds(sizes)
    columns = np.stack([1 / predicted, sizes / predicted], axis=1)
    degrees_of_freedom = len(sizes) - 2
    variance = float(np.sum((times / predicted - 1) ** 2)) / degrees_of_freedom
    scale = np.linalg.norm(columns, axis=0)  # columns of equal norm, as byte counts make the matrix ill-conditioned
    inverse = np.linalg.inv((columns / scale).T @ (columns / scale))
    return _STUDENT[min(degrees_of_freedom, len(_STUDENT)) - 1] * math.sqrt(variance * inverse[1, 1]) / float(scale[1])


def moving_s(row: Row) -> float:
    """Return a call's mean time without its wait for other ranks; its median time if that wait is zero or not known."""
    return float(row["transfer_s"] / row["calls"] if row["wait_s"] else row["p50_s"])


def ceiling_of(ceilings: list[Row], transport: str, sums: str | None) -> Cost | str | None:
    """Return the cost measured by `clcomm tune` for a transport, None if missing, or the reason why it does not apply.

    `sums` is "device" or "numpy", as in this run; None if unknown.
    """
    for each in ceilings:
        if each["transport"] == transport:
            if transport != "mpi" and sums not in (None, each["sums"]):
                measured, own = SUMMED_BY[each["sums"]], SUMMED_BY[sums or "numpy"]
                return f"`clcomm tune` measured sums by {measured}, this run's were by {own}"
            return Cost(each["alpha_s"], each["beta_s_per_byte"])
    return None


def advise(costs: Costs, layout: list[list[int]]) -> Advice:
    """Return the predictions for a plan and for other bucket sizes; `layout` has the bytes of each bucket's tensors."""
    tensors = [nbytes for bucket in layout for nbytes in bucket]
    recommendation = recommend(tensors[::-1], costs.cost.seconds)
    current_s = sum(costs.cost.seconds(sum(bucket)) for bucket in layout)
    return Advice(recommendation, current_s, len(layout))


def is_current(candidate: Candidate, layout: list[list[int]]) -> bool:
    """Return whether a bucket size gives the run's own plan."""
    return list(candidate.buckets) == [sum(bucket) for bucket in layout]


# --- Sums, means and shares of a run, shared by a report's sections. ---


def warm(record: Record, stats: CommStats) -> tuple[Record, CommStats]:
    """Return a rank's record and stats without its first steps; unchanged if these are unknown."""
    cold = record["cold"]
    if cold is None or not record["steps"] or record["steps"] <= cold["steps"] or record["training_s"] is None:
        return record, stats
    changed = {
        "steps": record["steps"] - cold["steps"],
        "training_s": max(0.0, record["training_s"] - cold["training_s"]),
        "data_wait_s": _less(record["data_wait_s"], cold["data_wait_s"]),
        "core_waits_s": record["core_waits_s"] and {
            name: _less(seconds, (cold["core_waits_s"] or {}).get(name, 0.0))
            for name, seconds in record["core_waits_s"].items()
        },
    }  # fmt: skip
    return {**record, **changed}, stats.without(CommStats.merged([cold["stats"]], stats.world_size))


def _less(seconds: float | None, earlier: float) -> float | None:
    return None if seconds is None else max(0.0, seconds - earlier)


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
        ceiling = ceiling_of(run.figures["ceilings"], self.reductions["transport"], self.sums)
        if any(row["part"] and row["label"] == GRADIENTS for row in self.counts["operations"]):
            ceiling = "gradients were reduced on a part of the ranks"
        self.ceiling = None if isinstance(ceiling, str) else ceiling
        self.no_ceiling = ceiling or "no such calls were measured on rank 0's host before"
        self.own_costs = own_costs(self.buckets)
        self.costs = self.own_costs if isinstance(self.own_costs, Costs) else self.stored_costs()
        layout = [bucket for bucket in run.figures["layout"] or [] if bucket]
        self.layout = layout
        can_predict = layout and self.buckets and not unfit(self.buckets)
        self.advice = advise(self.costs, layout) if self.costs and can_predict else None

    @property
    def cold_steps(self) -> int:
        """The steps at the start of the run that means, shares and causes leave out."""
        return round((self.all_steps or 0) - (self.steps or 0))

    def stored_costs(self) -> Costs | None:
        """Return the costs that `clcomm tune` measured on this host; None if there are none that apply."""
        return Costs(self.ceiling, "measured by `clcomm tune` on this host") if self.ceiling else None

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
