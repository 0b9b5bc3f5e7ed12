"""What was communicated: an observer that counts calls, bytes and seconds of every collective.

Bandwidths follow nccl-tests' definitions (its doc/PERFORMANCE.md): algbw is the size of an operation over its time,
busbw is algbw times the share of that size which has to cross each rank's link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1


class Collective(NamedTuple):
    """One finished collective, as an observer sees it.

    `nbytes` is the operation's size in nccl-tests' sense: the array for all-reduce, broadcast and reduce-scatter
    (its input), the gathered whole for all-gather, gather and scatter. `seconds` is what the caller spent in it.
    `wire_nbytes` is what a rank put in instead of `nbytes` where a compressed form travelled; None: no other form.
    `bucket` is the index of the bucket it reduces, -1: none. `began_s` is time.perf_counter() when the caller entered
    it: one clock for all processes of a host. `wait_s` is the part of `seconds` spent waiting for other ranks to come,
    `exposed_s` the part in which the caller could do nothing else; None: all of it. `last_rank` is the rank that came
    last, -1: not known, and `late_s` by how much it came after the one before it.
    """

    operation: str
    label: str
    nbytes: int
    seconds: float
    transport: str
    sequence: int
    failed: bool = False
    wire_nbytes: int | None = None
    bucket: int = -1
    began_s: float = 0.0
    wait_s: float = 0.0
    exposed_s: float | None = None
    last_rank: int = -1
    late_s: float = 0.0


class Phase(NamedTuple):
    """One finished part of a program that is no collective: "pack", "forward_backward", "optimizer", "step", ...

    `began_s` is time.perf_counter() at its begin, `seconds` how long it took, `bucket` whose part it is, -1: of none.
    """

    name: str
    began_s: float
    seconds: float
    label: str = ""
    bucket: int = -1


class Observer(Protocol):
    """Anything that wants to see a Communicator's collectives; it must not communicate itself.

    One that has a method `phase_finished(phase: Phase)` is told about phases too.
    """

    def collective_finished(self, event: Collective) -> None: ...


def bus_factor(operation: str, world_size: int) -> float:
    """Return busbw / algbw of an operation: how much of its size crosses a link of each rank."""
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if operation in ("all_gather", "reduce_scatter", "gather", "scatter"):
        return (world_size - 1) / world_size
    return 1.0


class Histogram:
    """Durations in about 1,000 logarithmic bins, 2% wide, from 0.1 us to 100 s: bounded, and it merges exactly."""

    _LOWEST_S, _RATIO, _BINS = 1e-7, 1.02, 1048
    _LOG_RATIO = math.log(_RATIO)

    def __init__(self) -> None:
        self.counts = np.zeros(self._BINS, np.int64)

    def add(self, seconds: float) -> None:
        position = int(math.log(max(seconds, self._LOWEST_S) / self._LOWEST_S) / self._LOG_RATIO)
        self.counts[min(position, self._BINS - 1)] += 1

    def percentile(self, share: float) -> float:
        """Return the duration in seconds below which this share (0 to 1) of all lies, to within a bin's width."""
        total = int(self.counts.sum())
        if total == 0:
            return 0.0
        rank = min(total - 1, int(share * total))
        position = int(np.searchsorted(np.cumsum(self.counts), rank, side="right"))
        return float(self._LOWEST_S * self._RATIO ** (position + 0.5))


class OperationStats:
    """Totals of one operation under one label."""

    def __init__(self) -> None:
        self.calls = self.nbytes = self.wire_nbytes = self.failures = 0
        self.seconds = self.max_s = 0.0
        self.histogram = Histogram()

    def add(self, event: Collective) -> None:
        if event.failed:
            self.failures += 1
            return
        self.calls += 1
        self.nbytes += event.nbytes
        self.wire_nbytes += event.nbytes if event.wire_nbytes is None else event.wire_nbytes
        self.seconds += event.seconds
        self.max_s = max(self.max_s, event.seconds)
        self.histogram.add(event.seconds)

    def as_dict(self, operation: str, label: str, world_size: int) -> dict[str, Any]:
        mean_s = self.seconds / self.calls if self.calls else 0.0
        algbw = self.nbytes / self.seconds if self.seconds else 0.0
        return {
            "operation": operation,
            "label": label,
            "calls": self.calls,
            "bytes": self.nbytes,
            "wire_bytes": self.wire_nbytes,
            "average_bytes_per_call": self.nbytes / self.calls if self.calls else 0.0,
            "seconds": self.seconds,
            "mean_s": mean_s,
            "p50_s": min(self.histogram.percentile(0.50), self.max_s),
            "p95_s": min(self.histogram.percentile(0.95), self.max_s),
            "max_s": self.max_s,
            "algbw_bytes_per_s": algbw,
            "busbw_bytes_per_s": algbw * bus_factor(operation, world_size),
            "failures": self.failures,
        }


class CommStats:
    """Counts of every operation of one Communicator since the last reset.

    Memory is bounded by the number of different operations and labels, not by the number of calls.
    """

    def __init__(self, world_size: int = 1):
        self.world_size = world_size
        self.ranks = 1
        self.operations: dict[tuple[str, str], OperationStats] = {}

    def collective_finished(self, event: Collective) -> None:
        key = event[:2]
        entry = self.operations.get(key)
        if entry is None:
            entry = self.operations[key] = OperationStats()
        entry.add(event)

    def reset(self) -> None:
        """Forget everything counted so far, e.g. at the start of an epoch."""
        self.operations.clear()

    def total(self, operation: str, label: str | None = None) -> dict[str, Any]:
        """Return one operation's counts, over all its labels unless one is named; zeros if it never ran."""
        chosen = [
            stats
            for (name, its_label), stats in self.operations.items()
            if name == operation and label in (None, its_label)
        ]
        return _folded(chosen).as_dict(operation, label or "", self.world_size)

    def as_dict(self) -> dict[str, Any]:
        """Return all counts as plain numbers, ready for JSON; see docs/reports.md for the fields."""
        rows = [s.as_dict(*key, self.world_size) for key, s in sorted(self.operations.items())]
        return {
            "schema": SCHEMA,
            "world_size": self.world_size,
            "ranks_merged": self.ranks,
            "seconds": sum(row["seconds"] for row in rows),
            "operations": rows,
        }

    def state(self) -> dict[tuple[str, str], OperationStats]:
        """Return what `merged` takes; it pickles, so ranks can exchange it."""
        return self.operations

    @classmethod
    def merged(cls, states: Iterable[Mapping[tuple[str, str], OperationStats]], world_size: int) -> CommStats:
        """Return the counts of one average rank: calls, bytes and seconds are means over the ranks' states.

        Percentiles are over all ranks' calls, maxima and failures over all ranks. A collective is called alike on
        every rank, so the means of calls and bytes are those of each rank.
        """
        states = list(states)
        result = cls(world_size)
        result.ranks = len(states)
        for key in sorted({key for state in states for key in state}):
            result.operations[key] = _folded([s[key] for s in states if key in s], ranks=len(states))
        return result

    def table(self, title: str = "Communication", *, width: int = 120) -> Table:
        """Return the counts as a rich table, most bytes first; times in ms, bandwidths in GB/s (10^9 bytes).

        In less than 110 characters the columns that others can be reckoned from are left out.
        """
        from rich.table import Table  # here, because most programs need it once, at their end

        whose = "" if self.ranks == 1 else f", mean of {self.ranks} ranks"
        table = Table(
            title=f"{title} per rank{whose}", title_justify="left", box=None, header_style="bold", pad_edge=False,
            collapse_padding=True, caption="times in ms, bandwidths in GB/s", caption_justify="left",
        )  # fmt: skip
        columns = _COLUMNS if width >= 110 else [column for column in _COLUMNS if not column.wide_only]
        for column in columns:
            table.add_column(column.heading, justify=column.justify, no_wrap=True)
        for row in sorted(self.as_dict()["operations"], key=lambda row: -row["bytes"]):
            table.add_row(*(column.write(row) for column in columns))
        return table


class _Column(NamedTuple):
    heading: str
    write: Callable[[dict[str, Any]], str]
    wide_only: bool = False
    justify: Literal["left", "right"] = "right"


def _milliseconds(key: str, digits: int = 3) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key] * 1e3:,.{digits}f}"


def _gigabytes(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key] / 1e9:,.2f}"


_COLUMNS = [
    _Column("operation", lambda row: f"{row['operation']} {row['label']}".strip(), justify="left"),
    _Column("calls", lambda row: f"{row['calls']:,}"),
    _Column("bytes", lambda row: f"{row['bytes']:,}"),
    _Column("bytes/call", lambda row: f"{row['average_bytes_per_call']:,.0f}"),
    _Column("total", _milliseconds("seconds", 1)),
    _Column("mean", _milliseconds("mean_s"), wide_only=True),
    _Column("p50", _milliseconds("p50_s")),
    _Column("p95", _milliseconds("p95_s"), wide_only=True),
    _Column("max", _milliseconds("max_s"), wide_only=True),
    _Column("algbw", _gigabytes("algbw_bytes_per_s"), wide_only=True),
    _Column("busbw", _gigabytes("busbw_bytes_per_s")),
    _Column("failed", lambda row: str(row["failures"]), wide_only=True),
]


def _folded(entries: list[OperationStats], ranks: int = 1) -> OperationStats:
    total = OperationStats()
    for entry in entries:
        total.calls += entry.calls
        total.nbytes += entry.nbytes
        total.wire_nbytes += entry.wire_nbytes
        total.failures += entry.failures
        total.max_s = max(total.max_s, entry.max_s)
        total.histogram.counts += entry.histogram.counts
    total.seconds = math.fsum(entry.seconds for entry in entries)  # exact, so the order of merging cannot matter
    if ranks > 1:
        total.calls = _mean(total.calls, ranks)
        total.nbytes = _mean(total.nbytes, ranks)
        total.wire_nbytes = _mean(total.wire_nbytes, ranks)
        total.seconds /= ranks
    return total


def _mean(count: int, ranks: int) -> int:
    """Return the mean, whole where it is whole, which it is for everything collective."""
    return count // ranks if count % ranks == 0 else round(count / ranks)
