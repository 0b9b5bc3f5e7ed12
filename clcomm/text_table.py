"""Tables that fit the width there is: numbers stay whole, and the columns that matter least go first."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from clcomm.terminal import output_width

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

#: Text wider than this, or than a third of the line, is folded before a column is left out.
_WIDE_TEXT = 24


class Column(NamedTuple):
    """A heading, whether cells end at the column's right edge, and characters that it takes at least."""

    heading: str
    right: bool = True
    least: int = 0


class Layout(NamedTuple):
    """The columns that a table shows, by index; how wide each is; the number of spaces between two."""

    shown: tuple[int, ...]
    widths: tuple[int, ...]
    gap: int


class Line(NamedTuple):
    """A line of a table, and its style as Rich names it."""

    text: str
    style: str = ""


class TextTable:
    """Rows of text under headings; `str()` gives it for the output's width, and Rich prints it in a console's.

    columns: the first one names the row. dropped_first: headings in the order in which columns are left out where
    there is no room; the note then names them. Where not even the rest has room, each cell has a line of its own.
    note: a line below, or several. styles: Rich's, by row. width: instead of what there is when it is printed.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        note: str = "",
        dropped_first: Sequence[str] = (),
        styles: Sequence[str] = (),
        width: int | None = None,
    ):
        self.columns, self.title, self.note, self.dropped_first = columns, title, note, dropped_first
        self.rows = [[_plain(cell) for cell in row] for row in rows]
        self.styles, self._width = styles or [""] * len(rows), width

    def layout(self, width: int) -> Layout | None:
        """Return the columns that a line of `width` has room for; None where the least of them have none."""
        natural = self._natural()
        folded = [min(each, self._folded(index, width)) for index, each in enumerate(natural)]
        for count in range(len(self.dropped_first) + 1):
            gone = self.dropped_first[:count]
            shown = tuple(index for index, column in enumerate(self.columns) if column.heading not in gone)
            for widths, gap in ((natural, 2), (natural, 1), (folded, 1)):
                spare = width - sum(widths[index] for index in shown) - gap * (len(shown) - 1)
                if spare >= 0:
                    return Layout(shown, _widened([(widths[index], natural[index]) for index in shown], spare), gap)
        return None

    def _natural(self) -> list[int]:
        """Return how wide each column is where nothing is folded."""
        cells = zip([column.heading for column in self.columns], *self.rows, strict=True)
        return [max(column.least, *map(_cells, own)) for column, own in zip(self.columns, cells, strict=True)]

    def _folded(self, index: int, width: int) -> int:
        """Return the width of a column whose longer cells are folded; only names are broken within a word."""
        most = max(_WIDE_TEXT, width // 3)
        if not self.columns[index].right:
            return most
        words = (word for row in self.rows for word in row[index].split())
        return max(most, max(map(_cells, words), default=0))

    def lines(self, width: int) -> Iterator[Line]:
        """Yield the table's lines, none longer than `width`."""
        layout = self.layout(width)
        if self.title:
            yield from (Line(part, "italic") for part in wrapped(self.title, width))
        yield from self.stacked(width) if layout is None else self._aligned(layout)
        missing = self.missing(layout)
        note = "; ".join(part for part in (self.note, missing) if part)
        for line in note.splitlines():
            yield from (Line(part, "dim italic") for part in wrapped(line, width))

    def _aligned(self, layout: Layout) -> Iterator[Line]:
        if any(self.columns[index].heading for index in layout.shown):
            yield from self.row_lines([column.heading for column in self.columns], layout, "bold")
        for row, style in zip(self.rows, self.styles, strict=True):
            yield from self.row_lines(row, layout, style)

    def row_lines(self, row: Sequence[str], layout: Layout, style: str = "") -> Iterator[Line]:
        """Yield the lines of one row, which are several where a cell is folded."""
        folded = [wrapped(row[index], width) for index, width in zip(layout.shown, layout.widths, strict=True)]
        for number in range(max(map(len, folded))):
            cells = []
            for index, width, parts in zip(layout.shown, layout.widths, folded, strict=True):
                part = parts[number] if number < len(parts) else ""
                blank = " " * (width - _cells(part))
                cells.append(blank + part if self.columns[index].right else part + blank)
            yield Line((" " * layout.gap).join(cells).rstrip(), style)

    def stacked(self, width: int) -> Iterator[Line]:
        """Yield all rows with a line for each cell."""
        for row, style in zip(self.rows, self.styles, strict=True):
            yield from (Line(part, style or "bold") for part in wrapped(row[0], width))
            for column, cell in list(zip(self.columns, row, strict=True))[1:]:
                text = f"{column.heading} {cell}".strip()
                if cell:
                    yield from (Line(f"  {part}", style) for part in wrapped(text, width - 2))

    def missing(self, layout: Layout | None) -> str:
        """Return which columns a layout leaves out, in words, and how many characters they all need."""
        if layout is None or len(layout.shown) == len(self.columns):
            return ""
        gone = [column.heading for index, column in enumerate(self.columns) if index not in layout.shown]
        whole = sum(self._natural()) + len(self.columns) - 1
        return f"no room for {', '.join(gone)} ({whole} columns show all)"

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines(self._width or output_width()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text  # here, because most programs print no table with Rich

        for line in self.lines(self._width or options.max_width):
            yield Text(line.text, line.style, no_wrap=True, overflow="ignore")


def _widened(widths: Sequence[tuple[int, int]], spare: int) -> tuple[int, ...]:
    """Return columns' widths, each (width, natural width), when those that are folded share what is left of a line."""
    result = []
    for width, natural in widths:
        more = min(spare, natural - width)
        result.append(width + more)
        spare -= more
    return tuple(result)


def wrapped(text: str, width: int) -> list[str]:
    """Return text as lines of at most `width` characters, broken at spaces and, within longer words, anywhere."""
    lines, line = [], ""
    indent = text[: len(text) - len(text.lstrip())]
    for word in text.split():
        joined = f"{line} {word}" if line else indent + word
        if _cells(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        line = word if lines else joined
        while _cells(line) > width:
            head = _head(line, width)
            lines.append(head)
            line = line[len(head) :]
    return [*lines, line]


def _head(text: str, width: int) -> str:
    """Return the beginning of a text that fills at most `width` characters, or to the end of a part."""
    end = len(text)
    while end > 1 and _cells(text[:end]) > width:
        end -= 1
    part = 1 + max(text.rfind(mark, 0, end) for mark in "-_/")
    return text[: part or end]


def _plain(text: str) -> str:
    """Return text without what would move a terminal's cursor."""
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def _cells(text: str) -> int:
    """Return how many characters wide a terminal shows a text (Unicode Standard Annex 11)."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.combining(each) > 0 for each in text)
