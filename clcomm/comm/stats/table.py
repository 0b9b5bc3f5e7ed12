"""The table that `CommStats.table` returns: one line for each operation and label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.base.units import format_number
from clcomm.comm.stats.events import Row


class TableColumn(NamedTuple):
    """A column's heading, the function that formats its cell of a row, and whether cells are aligned right."""

    heading: str
    write: Callable[[Row], str]
    right: bool = True


def _milliseconds(key: str, places: int = 3) -> Callable[[Row], str]:
    return lambda row: format_number(row[key] * 1e3, places)


def _bandwidth(key: str) -> Callable[[Row], str]:
    return lambda row: format_number(row[key] / 1e9) if row[key] else "-"


def _waiting(row: Row) -> str:
    if row["wait_unknown_s"]:
        return "-"  # at least part of it was not measured apart from moving data
    return f"{row['wait_s'] / row['seconds']:.0%}" if row["wait_s"] else ""


def named(row: Row) -> str:
    """Return the label of a row with the part of the Communicator: "gradients on dp"."""
    return f"{row['label']} on {row['part']}".strip() if row["part"] else row["label"]


COLUMNS = [
    TableColumn("operation", lambda row: f"{row['operation']} {named(row)}".strip(), right=False),
    TableColumn("calls", lambda row: f"{row['calls']:,}"),
    TableColumn("bytes", lambda row: f"{row['bytes']:,}"),
    TableColumn("bytes/call", lambda row: f"{row['average_bytes_per_call']:,.0f}"),
    TableColumn("messages", lambda row: f"{row['messages']:,.0f}" if row["messages"] else ""),
    TableColumn("total", _milliseconds("seconds", 1)),
    TableColumn("waiting", _waiting),
    TableColumn("p50", _milliseconds("p50_s")),
    TableColumn("p95", _milliseconds("p95_s")),
    TableColumn("max", _milliseconds("max_s")),
    TableColumn("algbw", _bandwidth("algbw_bytes_per_s")),
    TableColumn("busbw", _bandwidth("busbw_bytes_per_s")),
    TableColumn("failed", lambda row: str(row["failures"])),
]
#: Columns in the order in which they are dropped where the table is too wide.
DROPPED_FIRST = ("algbw", "p95", "waiting", "max", "busbw", "p50", "bytes/call", "bytes", "messages", "total")


def make_table(operations: Sequence[Row], ranks: int, title: str, width: int | None) -> TextTable:
    """Return the counts as a table, most bytes first; times in ms, bandwidths in GB/s (10^9 bytes).

    Args:
        operations: as in `CommStats.as_dict()`.
        ranks: the number of ranks over which they are means.
        title: of the table, which adds the number of ranks to it.
        width: in characters; None: the output's.
    """
    whose = "" if ranks == 1 else f", mean of {ranks} ranks"
    found = sorted(operations, key=lambda row: -row["bytes"])
    failed = any(row["failures"] for row in found)
    counted = any(row["messages"] for row in found)
    columns = [each for each in COLUMNS if counted or each.heading != "messages"]
    return TextTable(
        [TextColumn(each.heading, each.right) for each in columns],
        [[each.write(row) for each in columns] for row in found],
        title=f"{title} per rank{whose}",
        note="times in ms, bandwidths in GB/s",
        dropped_first=(*DROPPED_FIRST, "failed") if failed else ("failed", *DROPPED_FIRST),
        width=width,
    )
