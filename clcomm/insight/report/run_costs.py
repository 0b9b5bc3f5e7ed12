"""Latency and bandwidth from a run's calls or from `clcomm tune`, and the bucket size that follows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.costfile import SUMMED_BY
from clcomm.comm.costs.forecast import Candidate, Recommendation, recommend
from clcomm.comm.costs.model import Bytes, Cost, Fit, fit
from clcomm.comm.stats.events import Row

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
