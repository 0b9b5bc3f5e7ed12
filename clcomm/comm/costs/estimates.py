"""Statistics of measured times: medians with confidence intervals, and a sign test of alternating times.

None assumes a distribution of the noise (W. J. Conover, "Practical Nonparametric Statistics", 3rd edition, 3.2, 3.4).
In the sign test turns of two alternatives alternate, so that other load on the machine slows both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

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


# --- The sign test ---

#: The chance of choosing the other alternative where both take the same time.
_CHANCE = 0.005


#: A smaller gain is not worth a change.
_WORTH = 0.98


class SignTest(NamedTuple):
    """Whether the other alternative is faster, and its share of won turns."""

    is_faster: bool
    wins: int
    turns: int

    def __str__(self) -> str:
        return f"faster in {self.wins} of {self.turns} turns"


def sign_test(default_s: np.ndarray, other_s: np.ndarray) -> SignTest:
    """Test whether the other alternative is faster than the default, given the seconds of the same turns."""
    turns, wins = len(default_s), int((other_s < default_s).sum())
    is_worth_it = float(np.median(other_s)) < _WORTH * float(np.median(default_s))
    return SignTest(is_worth_it and _chance_of(wins, turns) <= _CHANCE, wins, turns)


def _chance_of(wins: int, turns: int) -> float:
    """Return the probability of so many wins or more where each turn is a coin toss."""
    return sum(math.comb(turns, count) for count in range(wins, turns + 1)) / (1 << turns)
