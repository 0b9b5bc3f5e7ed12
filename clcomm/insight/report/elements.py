"""A report's elements as data: tables and charts of seconds, bytes and shares, and the formats of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from clcomm.base.units import format_number, format_size
from clcomm.comm.stats.events import Row
from clcomm.insight.drawing.scene import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, Paint, time_text
from clcomm.insight.report import step_parts
from clcomm.sync.clipping import CLIPPING

#: The most rows of a table, bars of a chart and rows of a timeline that are shown; JSON and CSV have all.
MOST_SHOWN = 64


class Column(NamedTuple):
    """A column: the key of its values in a row, its heading, and the kind of its values, a key of KINDS."""

    key: str
    heading: str
    kind: str = "count"


@dataclass(frozen=True)
class Table:
    """Rows of plain values under columns, with a note.

    A page shows the last `folded` rows on demand, under the line `folded_as`.
    """

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
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
        """A sentence on the rows that `cells` leaves out; "" if none."""
        return f"{MOST_SHOWN} of {len(self.rows)} rows; JSON and CSV have all." if len(self.rows) > MOST_SHOWN else ""

    def filled(self) -> Table:
        """Return the table without columns that are empty in every row."""
        return replace(self, columns=with_values(self.columns, self.rows))


def with_values(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
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


def written(value: object, kind: str) -> str:
    """Return a value as text; "" for None, "-" for None among bandwidths."""
    if value is None:
        return "-" if kind == "gb_s" else ""
    return value if isinstance(value, str) else KINDS[kind](value)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular for 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def milliseconds(seconds: float) -> str:
    """Return a duration as text for a sentence: in ms, from 1 s on in s."""
    return f"{format_number(seconds * 1e3)} ms" if seconds < 1 else f"{seconds:,.2f} s"


# --- The colour of each part, the same in every chart; there are more parts than colours, so some are striped. ---

#: Parts of one colour are of one kind: waiting for ranks or a core, moving, packing, computing.
PAINTS = {
    step_parts.DATA: Paint(ORANGE),
    step_parts.OTHER_LABELS["tuning"]: Paint(ORANGE, striped=True),
    step_parts.COMPUTING: Paint(GREEN),
    step_parts.DEVICE: Paint(GREEN, striped=True),
    step_parts.PACK: Paint(SKY),
    step_parts.UNPACK: Paint(SKY, striped=True),
    step_parts.WAIT: Paint(VERMILLION),
    step_parts.CORE: Paint(VERMILLION, striped=True),
    step_parts.moving(several=True, compressed=False): Paint(BLUE),
    step_parts.moving(several=True, compressed=True): Paint(BLUE),
    step_parts.moving(several=False, compressed=False): Paint(BLUE),
    step_parts.EITHER: Paint(BLUE, striped=True),
    step_parts.OPTIMIZER: Paint(PURPLE),
    step_parts.OTHER_LABELS["checks"]: Paint(PURPLE, striped=True),
    step_parts.HIDDEN: Paint(YELLOW),
    CLIPPING: Paint(YELLOW, striped=True),
    "came last": Paint(VERMILLION),
    step_parts.COMPUTING_TOO: Paint(GREY, striped=True),
    step_parts.REST: Paint(GREY),
}


def paint_of(part: str) -> Paint:
    return PAINTS.get(part, Paint(GREY))
