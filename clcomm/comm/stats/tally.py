"""Counts of the collectives of one operation, label and bucket; times are whole nanoseconds, so sums are exact."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import Any

import numpy as np

#: Of several Collectives: the values of each field, in the order of Collective's.
Fields = tuple[tuple[Any, ...], ...]


def to_ns(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return durations in whole nanoseconds, as Python's integers where int64 does not hold one."""
    whole = np.asarray(seconds, np.float64) * 1e9 + 0.5
    if whole.max(initial=0.0) >= 2.0**63:
        return np.array([int(each) for each in whole], object)
    return whole.astype(np.int64)


class Tally:
    """Totals of one operation, label and bucket; `transport` joins the names of several: "mpi+shared".

    ranks: of the part of the Communicator in which they ran; 0: all; -1: of parts of different sizes.
    """

    __slots__ = (
        "calls",
        "failures",
        "hidden_ns",
        "histogram",
        "max_ns",
        "message_nbytes",
        "messages",
        "nbytes",
        "ns",
        "ranks",
        "transport",
        "wait_ns",
        "wait_unknown_ns",
        "wire_nbytes",
    )  # fmt: skip

    def __init__(self, transport: str = "") -> None:
        self.transport, self.ranks = transport, 0
        self.calls = self.nbytes = self.wire_nbytes = self.failures = self.messages = self.message_nbytes = 0
        self.ns = self.wait_ns = self.wait_unknown_ns = self.hidden_ns = self.max_ns = 0
        self.histogram = Histogram()

    def add(self, fields: Fields) -> None:
        """Count collectives; of those that failed, only the failures."""
        _, _, sizes, seconds, transports, _, failed, wires, _, _, waits, exposed, *_ = fields
        for name in {*transports} - {self.transport}:
            self.transport = _joined(self.transport, name)
        if True in failed:
            self.failures += failed.count(True)
            if not all(failed):
                self.add(tuple(tuple(compress(values, map(not_, failed))) for values in fields))
            return
        times = np.array(seconds, np.float64)
        ns = exposed_ns = to_ns(times)
        if exposed.count(None) < len(exposed):
            given = [whole if part is None else part for whole, part in zip(seconds, exposed, strict=True)]
            exposed_ns = np.minimum(ns, to_ns(given))
            self.hidden_ns += int((ns - exposed_ns).sum())
        if None in waits:
            is_known = np.array([wait is not None for wait in waits])
            self.wait_unknown_ns += int(exposed_ns[~is_known].sum())
            waits, exposed_ns = tuple(wait for wait in waits if wait is not None), exposed_ns[is_known]
        self.calls += len(ns)
        self.nbytes += sum(sizes)
        if wires.count(None) == len(wires):
            self.wire_nbytes += sum(sizes)
        else:
            self.wire_nbytes += sum(size if wire is None else wire for size, wire in zip(sizes, wires, strict=True))
        self.messages += sum(fields[19])
        self.message_nbytes += sum(fields[20])
        self.ns += int(ns.sum())
        self.wait_ns += int(np.minimum(exposed_ns, to_ns(waits)).sum())
        self.max_ns = max(self.max_ns, int(ns.max()))
        self.histogram.add_all(times)

    def absorb(self, other: Tally) -> None:
        """Add another Tally's counts."""
        self.transport = _joined(self.transport, other.transport)
        if not (self.calls or self.failures):
            self.ranks = other.ranks
        elif self.ranks != other.ranks:
            self.ranks = -1
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_ns = max(self.max_ns, other.max_ns)
        self.histogram.merge(other.histogram)

    def leave_out(self, other: Tally) -> None:
        """Subtract another Tally's counts, which are a part of these; the longest call stays."""
        for name in _COUNTS:
            setattr(self, name, max(0, getattr(self, name) - getattr(other, name)))

    def state(self) -> dict[str, Any]:
        """Return the counts in JSON-compatible form, for `restored`."""
        counts = {name: getattr(self, name) for name in ("transport", "ranks", *_COUNTS, "max_ns")}
        return counts | {"histogram": self.histogram.as_text()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Tally:
        """Return the Tally whose `state` this is; ValueError for a malformed histogram."""
        tally = cls()
        for name in ("transport", "ranks", *_COUNTS, "max_ns"):
            setattr(tally, name, state[name])
        tally.histogram = Histogram.of(state["histogram"])
        return tally


@lru_cache(maxsize=64)  # a tally of several transports joins them at every collective
def _joined(one: str, other: str) -> str:
    """Return the names in two transports, sorted, each once: "mpi+shared"."""
    return "+".join(sorted({*one.split("+"), *other.split("+")} - {""}))


_COUNTS = (
    "calls", "nbytes", "wire_nbytes", "messages", "message_nbytes", "failures", "ns", "wait_ns", "wait_unknown_ns",
    "hidden_ns",
)  # fmt: skip


# --- Percentiles of durations in bounded memory. ---


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
