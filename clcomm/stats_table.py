"""The table that `CommStats.table` returns: one line for each operation and label."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from clcomm.text_table import Column, TextTable
from clcomm.units import format_number

if TYPE_CHECKING:
    from clcomm.stats import CommStats


class Figure(NamedTuple):
    """A column's heading, and how a row's cell is written."""

    heading: str
    write: Callable[[dict[str, Any]], str]
    right: bool = True


def _milliseconds(key: str, places: int = 3) -> Callable[[dict[str, Any]], str]:
    return lambda row: format_number(row[key] * 1e3, places)


def _bandwidth(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: format_number(row[key] / 1e9) if row[key] else "-"


def _waiting(row: dict[str, Any]) -> str:
    if row["untold_s"]:
        return "-"  # part of it at least is not told from moving data
    return f"{row['wait_s'] / row['seconds']:.0%}" if row["wait_s"] else ""


COLUMNS = [
    Figure("operation", lambda row: f"{row['operation']} {row['label']}".strip(), right=False),
    Figure("calls", lambda row: f"{row['calls']:,}"),
    Figure("bytes", lambda row: f"{row['bytes']:,}"),
    Figure("bytes/call", lambda row: f"{row['average_bytes_per_call']:,.0f}"),
    Figure("total", _milliseconds("seconds", 1)),
    Figure("waiting", _waiting),
    Figure("p50", _milliseconds("p50_s")),
    Figure("p95", _milliseconds("p95_s")),
    Figure("max", _milliseconds("max_s")),
    Figure("algbw", _bandwidth("algbw_bytes_per_s")),
    Figure("busbw", _bandwidth("busbw_bytes_per_s")),
    Figure("failed", lambda row: str(row["failures"])),
]
#: What goes first where there is too little room for all.
DROPPED_FIRST = ("algbw", "p95", "waiting", "max", "busbw", "p50", "bytes/call", "bytes", "total")


def make_table(stats: CommStats, title: str, width: int | None) -> TextTable:
    """Return the counts as a table, most bytes first; times in ms, bandwidths in GB/s (10^9 bytes)."""
    whose = "" if stats.ranks == 1 else f", mean of {stats.ranks} ranks"
    found = sorted(stats.as_dict()["operations"], key=lambda row: -row["bytes"])
    failed = any(row["failures"] for row in found)
    return TextTable(
        [Column(each.heading, each.right) for each in COLUMNS],
        [[each.write(row) for each in COLUMNS] for row in found],
        title=f"{title} per rank{whose}",
        note="times in ms, bandwidths in GB/s",
        dropped_first=(*DROPPED_FIRST, "failed") if failed else ("failed", *DROPPED_FIRST),
        width=width,
    )
