"""Counts of the collectives of one operation, label and bucket; times are whole nanoseconds, so sums are exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import Any

import numpy as np

from clcomm.comm.stats.histogram import Histogram

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
