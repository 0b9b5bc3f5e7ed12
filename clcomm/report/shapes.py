"""A report's tables and charts as data: values in seconds, bytes and shares, and how each kind of them is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clcomm.units import format_number, format_size

#: Rows shown to people; JSON and CSV have them all.
MOST_SHOWN = 64


class Column(NamedTuple):
    """The key of a row's value, the heading above it, and what kind of value it is: a key of KINDS."""

    key: str
    heading: str
    kind: str = "count"


@dataclass(frozen=True)
class Table:
    """Rows of plain values under columns; `note` says in a sentence how to read it."""

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]
    note: str = ""

    def cells(self) -> list[list[str]]:
        """Return the rows as text, at most MOST_SHOWN of them."""
        return [
            [written(row.get(column.key), column.kind) for column in self.columns] for row in self.rows[:MOST_SHOWN]
        ]

    @property
    def left_out(self) -> str:
        """What `cells` leaves out, as a sentence; empty where it has everything."""
        return f"{MOST_SHOWN} of {len(self.rows)} rows; JSON and CSV have all." if len(self.rows) > MOST_SHOWN else ""

    def filled(self) -> Table:
        """Return the table without columns that are empty in every row."""
        return Table(self.key, self.title, with_values(self.columns, self.rows), self.rows, self.note)


def with_values(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns that are not empty in every row."""
    return [column for column in columns if any(row.get(column.key) not in (None, "") for row in rows)]


KINDS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": lambda value: f"{value:,}",
    "ms": lambda value: format_number(value * 1e3, 3),
    "whole_ms": lambda value: format_number(value * 1e3, 1),
    "us": lambda value: format_number(value * 1e6, 1),
    "ratio": lambda value: f"{value:.2f}",
    "share": lambda value: f"{value:.1%}",
    "gb_s": lambda value: format_number(value / 1e9),
    "size": format_size,
    "ns_per_kib": lambda value: format_number(value * 1024e9, 1),
}


def written(value: Any, kind: str) -> str:
    """Return a value as people read it; for None nothing, or a dash among bandwidths."""
    if value is None:
        return "-" if kind == "gb_s" else ""
    return value if isinstance(value, str) else KINDS[kind](value)


def count(number: int, noun: str) -> str:
    """Return so many of something in words."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# --- charts ---

#: A part has the same colour in every chart: its place in the palettes of page.css and png.py.
_COLOURS = {
    "wait for data": 0, "forward and backward": 1, "pack": 2, "wait for ranks": 3, "came last": 3, "move and add": 4,
    "compress, move and add": 4, "communication": 4, "unpack": 5, "optimizer": 6, "checks and join": 7,
    "wait for the device": 9, "trying bucket sizes": 10, "wait or move": 11, "wait for a core": 12, "hidden": 13,
}  # fmt: skip
_OTHER_COLOUR = 8


def colour_of(part: str) -> int:
    """Return the number of a part's colour."""
    return _COLOURS.get(part, _OTHER_COLOUR)


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, each of parts one after the other; values[i][j] is part j of bar i, in `unit`."""

    title: str
    parts: Sequence[str]
    bars: Sequence[str]
    values: Sequence[Sequence[float]]
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Distribution:
    """How many calls took how long: `counts[i]` between `edges_s[i]` and `edges_s[i + 1]`; `marks` are percentiles."""

    title: str
    edges_s: Sequence[float]
    counts: Sequence[int]
    marks: Sequence[tuple[str, float]]
    note: str = ""


@dataclass(frozen=True)
class Points:
    """Measured (bytes, seconds), and the line that was fitted to them."""

    title: str
    points: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]]
    note: str = ""


Chart = Bars | Distribution | Points
