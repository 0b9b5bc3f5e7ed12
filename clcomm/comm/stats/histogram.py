"""Percentiles of durations in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np


class Histogram:
    """Durations in about 1,000 logarithmic bins, 2% wide, from 0.1 us to 100 s; merging is exact."""

    _LOWEST_S, _RATIO, _BINS = 1e-7, 1.02, 1048
    _BINS_PER_E = 1 / math.log(_RATIO)
    _LOWEST = math.log(_LOWEST_S) * _BINS_PER_E

    def __init__(self) -> None:
        self.counts = array("Q", bytes(8 * self._BINS))  # increments are several times faster than in a NumPy array

    def add(self, seconds: float) -> None:
        """Count a duration; one outside the bins' range counts in the first or the last."""
        position = int(math.log(seconds) * self._BINS_PER_E - self._LOWEST) if seconds > self._LOWEST_S else 0
        self.counts[position if position < self._BINS else -1] += 1

    def add_all(self, times: Sequence[float] | np.ndarray) -> None:
        """Count durations in seconds, as `add` does, many at a time."""
        places = np.log(np.maximum(times, self._LOWEST_S)) * self._BINS_PER_E - self._LOWEST
        bins = np.clip(places.astype(np.int64), 0, self._BINS - 1)
        mine = np.asarray(self.counts)
        mine += np.bincount(bins, minlength=self._BINS).astype(mine.dtype)

    def percentile(self, share: float) -> float:
        """Return the seconds below which this share (0 to 1) of all durations lies, to within a bin; 0 without any."""
        up_to = np.cumsum(self.counts)
        total = int(up_to[-1])
        if total == 0:
            return 0.0
        rank = min(total - 1, int(share * total))
        return float(self._LOWEST_S * self._RATIO ** (int(np.searchsorted(up_to, rank, side="right")) + 0.5))

    def merge(self, other: Histogram) -> None:
        """Add another one's counts."""
        mine = np.asarray(self.counts)
        mine += np.asarray(other.counts)

    def coarse(self, most_bins: int) -> tuple[list[float], list[int]]:
        """Return edges in seconds and counts of at most `most_bins` bins, each as wide as the others on a log scale."""
        held = [position for position, count in enumerate(self.counts) if count]
        if not held:
            return [], []
        width = -(-(held[-1] - held[0] + 1) // most_bins)
        starts = range(held[0], held[-1] + 1, width)
        counts = [sum(self.counts[start : start + width]) for start in starts]
        return [self._LOWEST_S * self._RATIO**edge for edge in (*starts, starts[-1] + width)], counts

    def as_text(self) -> str:
        """Return "bin:count" of every nonempty bin, separated by spaces; `of` parses it."""
        return " ".join(f"{position}:{count}" for position, count in enumerate(self.counts) if count)

    @classmethod
    def of(cls, text: str) -> Histogram:
        """Parse what `as_text` returned; ValueError for other text."""
        histogram = cls()
        for pair in text.split():
            position, count = map(int, pair.split(":"))
            if not (0 <= position < cls._BINS and 0 < count <= _MOST_COUNT):
                raise ValueError(f"expected bins from 0 to {cls._BINS - 1} and counts above 0, got {pair}")
            histogram.counts[position] += count
        return histogram


_MOST_COUNT = 1 << 40  # so that no sum over ranks overflows
