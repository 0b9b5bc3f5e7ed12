"""The table that `CommStats.table` returns: one line for each operation and label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from clcomm.units import format_number

if TYPE_CHECKING:
    from clcomm.stats import CommStats


class Column(NamedTuple):
    """A heading, and how a row's cell is written."""

    heading: str
    write: Callable[[dict[str, Any]], str]
    justify: Literal["left", "right"] = "right"


def _milliseconds(key: str, places: int = 3) -> Callable[[dict[str, Any]], str]:
    return lambda row: format_number(row[key] * 1e3, places)


def _bandwidth(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: format_number(row[key] / 1e9) if row[key] else "-"


def _waiting(row: dict[str, Any]) -> str:
    if row["untold_s"]:
        return "-"  # part of it at least is not told from moving data
    return f"{row['wait_s'] / row['seconds']:.0%}" if row["wait_s"] else ""


COLUMNS = [
    Column("operation", lambda row: f"{row['operation']} {row['label']}".strip(), justify="left"),
    Column("calls", lambda row: f"{row['calls']:,}"),
    Column("bytes", lambda row: f"{row['bytes']:,}"),
    Column("bytes/call", lambda row: f"{row['average_bytes_per_call']:,.0f}"),
    Column("total", _milliseconds("seconds", 1)),
    Column("waiting", _waiting),
    Column("p50", _milliseconds("p50_s")),
    Column("p95", _milliseconds("p95_s")),
    Column("max", _milliseconds("max_s")),
    Column("algbw", _bandwidth("algbw_bytes_per_s")),
    Column("busbw", _bandwidth("busbw_bytes_per_s")),
    Column("failed", lambda row: str(row["failures"])),
]
#: What goes first where there is too little room for all.
DROPPED_FIRST = ("algbw", "p95", "waiting", "max", "failed", "busbw", "p50", "bytes/call", "bytes")


def fitting(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, dropped_first: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Return the indices of the columns that a line of `width` has room for, and the headings of those left out."""
    widths = [max(map(len, column)) + 1 for column in zip(headings, *rows, strict=True)]
    left_out: list[str] = []
    for heading in (None, *dropped_first):
        left_out += [heading] if heading is not None else []
        kept = [index for index, each in enumerate(headings) if each not in left_out]
        if sum(widths[index] for index in kept) - 1 <= width:
            break
    return kept, [heading for heading in headings if heading in left_out]


def make_table(stats: CommStats, title: str, width: int) -> Table:
    """Return the counts as a table, most bytes first; times in ms, bandwidths in GB/s (10^9 bytes)."""
    whose = "" if stats.ranks == 1 else f", mean of {stats.ranks} ranks"
    found = sorted(stats.as_dict()["operations"], key=lambda row: -row["bytes"])
    rows = [[column.write(row) for column in COLUMNS] for row in found]
    kept, left_out = fitting([column.heading for column in COLUMNS], rows, width, DROPPED_FIRST)
    missing = f"; no room for {', '.join(left_out)}" if left_out else ""
    table = Table(
        title=f"{title} per rank{whose}", title_justify="left", box=None, header_style="bold", pad_edge=False,
        collapse_padding=True, caption=f"times in ms, bandwidths in GB/s{missing}", caption_justify="left",
    )  # fmt: skip
    for index in kept:
        table.add_column(COLUMNS[index].heading, justify=COLUMNS[index].justify, no_wrap=index > 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[index]) for index in kept))
    return table
