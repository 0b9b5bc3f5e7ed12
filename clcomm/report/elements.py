"""A report's elements as data: tables and charts of seconds, bytes and shares, and how each kind of value is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from clcomm.drawing.axes import time_text
from clcomm.units import format_number, format_size

#: The most rows of a table, bars of a chart and rows of a timeline that are shown; JSON and CSV have all.
MOST_SHOWN = 64


class Column(NamedTuple):
    """A column: the key of its values in a row, its heading, and the kind of its values, a key of KINDS."""

    key: str
    heading: str
    kind: str = "count"


@dataclass(frozen=True)
class Table:
    """Rows of plain values under columns, with a note on how to read them.

    A page shows the last `folded` rows on demand, under the line `folded_as`.
    """

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]
    note: str = ""
    folded: int = 0
    folded_as: str = ""

    def cells(self) -> list[list[str]]:
        """Return the rows as text, at most MOST_SHOWN of them."""
        return [
            [written(row.get(column.key), column.kind) for column in self.columns] for row in self.rows[:MOST_SHOWN]
        ]

    @property
    def left_out(self) -> str:
        """A sentence on the rows that `cells` leaves out; "" where it leaves out none."""
        return f"{MOST_SHOWN} of {len(self.rows)} rows; JSON and CSV have all." if len(self.rows) > MOST_SHOWN else ""

    def filled(self) -> Table:
        """Return the table without columns that are empty in every row."""
        return replace(self, columns=with_values(self.columns, self.rows))


def with_values(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns that are not empty in every row."""
    return [column for column in columns if any(row.get(column.key) not in (None, "") for row in rows)]


KINDS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "right": str,
    "count": lambda value: f"{value:,}",
    "ms": lambda value: format_number(value * 1e3, 3),
    "whole_ms": lambda value: format_number(value * 1e3, 1),
    "time": time_text,
    "ratio": lambda value: f"{value:.2f}",
    "share": lambda value: f"{value:.1%}",
    "gb_s": lambda value: format_number(value / 1e9),
    "size": format_size,
    "time_per_kib": lambda value: time_text(value * 1024),
}


def written(value: Any, kind: str) -> str:
    """Return a value as text; "" for None, "-" for None among bandwidths."""
    if value is None:
        return "-" if kind == "gb_s" else ""
    return value if isinstance(value, str) else KINDS[kind](value)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def milliseconds(seconds: float) -> str:
    """Return a duration as text for a sentence: in ms, from one second on in s."""
    return f"{format_number(seconds * 1e3)} ms" if seconds < 1 else f"{seconds:,.2f} s"


# --- charts ---


@dataclass(frozen=True)
class Bars:
    """Horizontal stacked bars; values[i][j] is part j of bar i, in `unit`.

    `mark` is the name and value of a line to compare all bars with.
    """

    title: str
    parts: Sequence[str]
    bars: Sequence[str]
    values: Sequence[Sequence[float]]
    unit: str
    note: str = ""
    mark: tuple[str, float] | None = None

    @property
    def longest(self) -> float:
        """The value at the right end: the longest bar or the mark."""
        return max([*map(sum, self.values), self.mark[1] if self.mark else 0.0]) or 1.0


@dataclass(frozen=True)
class Distribution:
    """A histogram of calls: `counts[i]` took between `edges_s[i]` and `edges_s[i + 1]`; `marks` are percentiles."""

    title: str
    edges_s: Sequence[float]
    counts: Sequence[int]
    marks: Sequence[tuple[str, float]]
    note: str = ""


@dataclass(frozen=True)
class Points:
    """Measured (bytes, seconds) and the line fitted to them."""

    title: str
    points: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]]
    note: str = ""


class Stretch(NamedTuple):
    """A stretch of a timeline's row from `begin_ms` to `end_ms`; `bucket` is -1 for none."""

    row: int
    part: str
    bucket: int
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A row for each rank, filled with consecutive `stretches`.

    `behind` are stretches of hidden communication; `steps` are the (row, ms) at which steps began.
    """

    title: str
    rows: Sequence[str]
    parts: Sequence[str]
    stretches: Sequence[Stretch]
    behind: Sequence[Stretch]
    steps: Sequence[tuple[int, float]]
    end_ms: float
    note: str = ""


class Curve(NamedTuple):
    """A curve's values in order; None where a value is not known."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Curves:
    """Curves over the same steps, each with its own axis; value i is at `steps[i]`."""

    title: str
    steps: Sequence[float]
    curves: Sequence[Curve]
    note: str = ""


@dataclass(frozen=True)
class Intervals:
    """Medians with their 95% intervals: (name, median, low, high); low and high are None without an interval."""

    title: str
    points: Sequence[tuple[str, float, float | None, float | None]]
    unit: str
    note: str = ""


Chart = Bars | Distribution | Points | Timeline | Curves | Intervals
