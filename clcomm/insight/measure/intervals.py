"""Medians with confidence intervals, and the significance of their difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

CONFIDENCE = 0.95
#: How intervals are made, for reports.
METHOD = "95% confidence interval of the median, from order statistics"


class Estimate(NamedTuple):
    """A median and its 95% confidence interval; `low` and `high` are None with too few values for an interval."""

    median: float
    low: float | None = None
    high: float | None = None

    @property
    def has_interval(self) -> bool:
        return self.low is not None and self.high is not None

    def differs_from(self, other: Estimate) -> bool | None:
        """Return whether the intervals are disjoint; None if one is missing."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return None
        return self.low > other.high or other.low > self.high

    def scaled(self, factor: float) -> Estimate:
        return Estimate(*(None if value is None else value * factor for value in self))  # type: ignore[arg-type]

    def rate_of(self, amount: float) -> Estimate:
        """Return the rate a second, given the `amount` done in this time; the longest time gives the lowest rate."""
        low, high = (None, None) if self.high is None or self.low is None else (self.high, self.low)
        return Estimate(*(value and amount / value for value in (self.median, low, high)))  # type: ignore[arg-type]

    def text(self, digits: int = 3) -> str:
        """Return the estimate as text such as "10.224 (10.120-10.371)"; "-" for NaN."""
        if math.isnan(self.median):
            return "-"
        around = "" if not self.has_interval else f" ({self.low:,.{digits}f}-{self.high:,.{digits}f})"
        return f"{self.median:,.{digits}f}{around}"

    def as_dict(self) -> dict[str, object]:
        return self._asdict()


def estimate(values: Iterable[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median of independent values with a confidence interval that assumes no distribution.

    Of n ordered values, the k-th from below and the k-th from above enclose the median with probability
    1 - 2 P(B < k), B binomial of n and 1/2 (W. Conover, Practical Nonparametric Statistics, section 3.2); k is the
    largest that gives `confidence`. 95% takes 6 values. Without values the median is NaN.
    """
    ordered = sorted(values)
    if not ordered:
        return Estimate(math.nan)
    median = statistics.median(ordered)
    k = _rank(len(ordered), confidence)
    return Estimate(median, ordered[k - 1], ordered[-k]) if k else Estimate(median)


def _rank(count: int, confidence: float) -> int:
    """Return the largest k for which two order statistics enclose the median with `confidence`; 0 if none does."""
    term = outside = 0.5**count if count < 1000 else 0.0
    if count >= 1000:  # the normal approximation, exact to a value or two there
        return int(count / 2 - statistics.NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(count) / 2)
    k = 0
    while 2 * outside <= 1 - confidence:
        k += 1
        term *= (count - k + 1) / k
        outside += term
    return k
