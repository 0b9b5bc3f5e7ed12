"""The table that `CommStats.table` returns: one line for each operation and label."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from clcomm.stats import CommStats

#: Characters from which on all columns are shown.
WIDE = 110


class Column(NamedTuple):
    """A heading, and how a row's cell is written; `wide_only` ones can be reckoned from the others."""

    heading: str
    write: Callable[[dict[str, Any]], str]
    wide_only: bool = False
    justify: Literal["left", "right"] = "right"


def _milliseconds(key: str, digits: int = 3) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[key] * 1e3:,.{digits}f}"


def _waiting(row: dict[str, Any]) -> str:
    return f"{row['wait_s'] / row['seconds']:.0%}" if row["wait_s"] else ""


COLUMNS = [
    Column("operation", lambda row: f"{row['operation']} {row['label']}".strip(), justify="left"),
    Column("calls", lambda row: f"{row['calls']:,}"),
    Column("bytes", lambda row: f"{row['bytes']:,}"),
    Column("bytes/call", lambda row: f"{row['average_bytes_per_call']:,.0f}"),
    Column("total", _milliseconds("seconds", 1)),
    Column("waiting", _waiting, wide_only=True),
    Column("p50", _milliseconds("p50_s")),
    Column("p95", _milliseconds("p95_s"), wide_only=True),
    Column("max", _milliseconds("max_s"), wide_only=True),
    Column("algbw", lambda row: f"{row['algbw_bytes_per_s'] / 1e9:,.2f}", wide_only=True),
    Column("busbw", lambda row: f"{row['busbw_bytes_per_s'] / 1e9:,.2f}"),
    Column("failed", lambda row: str(row["failures"]), wide_only=True),
]


def make_table(stats: CommStats, title: str, width: int) -> Table:
    """Return the counts as a table, most bytes first; times in ms, bandwidths in GB/s (10^9 bytes)."""
    whose = "" if stats.ranks == 1 else f", mean of {stats.ranks} ranks"
    table = Table(
        title=f"{title} per rank{whose}", title_justify="left", box=None, header_style="bold", pad_edge=False,
        collapse_padding=True, caption="times in ms, bandwidths in GB/s", caption_justify="left",
    )  # fmt: skip
    columns = [column for column in COLUMNS if width >= WIDE or not column.wide_only]
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    for row in sorted(stats.as_dict()["operations"], key=lambda row: -row["bytes"]):
        table.add_row(*(Text(column.write(row)) for column in columns))
    return table
