"""Counts of the collectives of one operation, label and bucket; times are whole nanoseconds, so sums are exact."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from clcomm.stats.events import Collective
from clcomm.stats.histogram import Histogram


class Tally:
    """Totals of one operation, label and bucket; `transport` joins the names of several: "mpi+shared"."""

    __slots__ = (
        "calls",
        "failures",
        "hidden_ns",
        "histogram",
        "max_ns",
        "nbytes",
        "ns",
        "transport",
        "wait_ns",
        "wait_unknown_ns",
        "wire_nbytes",
    )  # fmt: skip

    def __init__(self, transport: str = "") -> None:
        self.transport = transport
        self.calls = self.nbytes = self.wire_nbytes = self.failures = 0
        self.ns = self.wait_ns = self.wait_unknown_ns = self.hidden_ns = self.max_ns = 0
        self.histogram = Histogram()

    def add(self, event: Collective) -> None:
        """Count a collective; of one that failed, only the failure."""
        _, _, nbytes, seconds, transport, _, failed, wire_nbytes, _, _, wait_s, exposed_s, *_ = event
        if transport != self.transport:
            self.transport = _joined(self.transport, transport)
        if failed:
            self.failures += 1
            return
        ns = int(seconds * 1e9 + 0.5)
        self.calls += 1
        self.nbytes += nbytes
        self.wire_nbytes += nbytes if wire_nbytes is None else wire_nbytes
        self.ns += ns
        exposed_ns = ns if exposed_s is None else min(ns, int(exposed_s * 1e9 + 0.5))
        self.hidden_ns += ns - exposed_ns
        if wait_s is None:
            self.wait_unknown_ns += exposed_ns
        elif wait_s:
            self.wait_ns += min(exposed_ns, int(wait_s * 1e9 + 0.5))
        if ns > self.max_ns:
            self.max_ns = ns
        self.histogram.add(seconds)

    def absorb(self, other: Tally) -> None:
        """Add another Tally's counts."""
        self.transport = _joined(self.transport, other.transport)
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_ns = max(self.max_ns, other.max_ns)
        self.histogram.merge(other.histogram)

    def state(self) -> dict[str, Any]:
        """Return the counts in JSON-compatible form, for `restored`."""
        counts = {name: getattr(self, name) for name in ("transport", *_COUNTS, "max_ns")}
        return counts | {"histogram": self.histogram.as_text()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Tally:
        """Return the Tally whose `state` this is; ValueError for a malformed histogram."""
        tally = cls()
        for name in ("transport", *_COUNTS, "max_ns"):
            setattr(tally, name, state[name])
        tally.histogram = Histogram.of(state["histogram"])
        return tally


@lru_cache(maxsize=64)  # a tally of several transports joins them at every collective
def _joined(one: str, other: str) -> str:
    """Return the names in two transports, sorted, each once: "mpi+shared"."""
    return "+".join(sorted({*one.split("+"), *other.split("+")} - {""}))


_COUNTS = ("calls", "nbytes", "wire_nbytes", "failures", "ns", "wait_ns", "wait_unknown_ns", "hidden_ns")
