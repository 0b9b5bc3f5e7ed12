"""Tables that fit the width: numbers are never cut, and the least important columns are dropped first."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from clcomm.base.console.terminal import output_width
from clcomm.base.errors import escaped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

#: Text that is wider than this and than a third of the line is folded before a column is left out.
_WIDE_TEXT = 24


class TextColumn(NamedTuple):
    """A heading, its alignment, and the least width in characters."""

    heading: str
    right: bool = True
    least: int = 0


class Layout(NamedTuple):
    """Indices and widths of the shown columns, and the spaces between them."""

    shown: tuple[int, ...]
    widths: tuple[int, ...]
    gap: int


class Line(NamedTuple):
    """A line of a table, and its style as Rich names it."""

    text: str
    style: str = ""


class TextTable:
    """Rows of text under headings, laid out for the output's width by `str()` and for a console's by Rich.

    If even the last columns do not fit, each cell has a line of its own.

    Args:
        columns: the first one names the row.
        note: one or more lines below the table.
        dropped_first: headings, in the order in which columns that do not fit are left out; the note names them.
        styles: Rich's, one for each row.
        width: in characters; None: the output's or the console's.
    """

    def __init__(
        self,
        columns: Sequence[TextColumn],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        note: str = "",
        dropped_first: Sequence[str] = (),
        styles: Sequence[str] = (),
        width: int | None = None,
    ):
        self.columns, self.title, self.note, self.dropped_first = columns, escaped(title), escaped(note), dropped_first
        self.rows = [[_plain(cell) for cell in row] for row in rows]
        self.styles, self._width = styles or [""] * len(rows), width

    def layout(self, width: int) -> Layout | None:
        """Return the columns that fit a line of `width`; None where even the last ones do not."""
        natural = self._natural_widths()
        folded = [min(each, self._folded_width(index, width)) for index, each in enumerate(natural)]
        for count in range(len(self.dropped_first) + 1):
            dropped = self.dropped_first[:count]
            shown = tuple(index for index, column in enumerate(self.columns) if column.heading not in dropped)
            for widths, gap in ((natural, 2), (natural, 1), (folded, 1)):
                spare = width - sum(widths[index] for index in shown) - gap * (len(shown) - 1)
                if spare >= 0:
                    return Layout(shown, _widened([(widths[index], natural[index]) for index in shown], spare), gap)
        return None

    def _natural_widths(self) -> list[int]:
        cells = zip([column.heading for column in self.columns], *self.rows, strict=True)
        return [max(column.least, *map(_display_width, own)) for column, own in zip(self.columns, cells, strict=True)]

    def _folded_width(self, index: int, width: int) -> int:
        """Return a column's largest width when long cells are folded; words are broken only in left-aligned columns."""
        most = max(_WIDE_TEXT, width // 3)
        if not self.columns[index].right:
            return most
        words = (word for row in self.rows for word in row[index].split())
        return max(most, max(map(_display_width, words), default=0))

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
        """Yield the lines of one row, several where a cell is folded."""
        folded = [wrapped(row[index], width) for index, width in zip(layout.shown, layout.widths, strict=True)]
        for number in range(max(map(len, folded))):
            cells = []
            for index, width, parts in zip(layout.shown, layout.widths, folded, strict=True):
                part = parts[number] if number < len(parts) else ""
                blank = " " * (width - _display_width(part))
                cells.append(blank + part if self.columns[index].right else part + blank)
            yield Line((" " * layout.gap).join(cells).rstrip(), style)

    def stacked(self, width: int) -> Iterator[Line]:
        """Yield the lines of all rows with one cell on each line, none longer than `width`."""
        for row, style in zip(self.rows, self.styles, strict=True):
            yield from (Line(part, style or "bold") for part in wrapped(row[0], width))
            for column, cell in list(zip(self.columns, row, strict=True))[1:]:
                text = f"{column.heading} {cell}".strip()
                if cell:
                    yield from (Line(f"  {part}", style) for part in wrapped(text, width - 2))

    def missing(self, layout: Layout | None) -> str:
        """Return a note on the columns that a layout leaves out, and the width that would show all."""
        if layout is None or len(layout.shown) == len(self.columns):
            return ""
        dropped = [column.heading for index, column in enumerate(self.columns) if index not in layout.shown]
        whole = sum(self._natural_widths()) + len(self.columns) - 1
        return f"no room for {', '.join(dropped)} ({whole} columns show all)"

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines(self._width or output_width()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text  # here, as most programs print no table with Rich

        for line in self.lines(self._width or options.max_width):
            yield Text(line.text, line.style, no_wrap=True, overflow="ignore")


def _widened(widths: Sequence[tuple[int, int]], spare: int) -> tuple[int, ...]:
    """Return the columns' widths after folded ones have taken the spare width.

    Args:
        widths: (width, natural width) of each column.
        spare: characters that are left in the line.
    """
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
        if _display_width(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        line = word if lines else joined
        while _display_width(line) > width:
            prefix = _longest_prefix(line, width)
            lines.append(prefix)
            line = line[len(prefix) :]
    return [*lines, line]


def _longest_prefix(text: str, width: int) -> str:
    """Return the longest prefix of at most `width` characters, if possible up to a "-", "_" or "/"."""
    end = len(text)
    while end > 1 and _display_width(text[:end]) > width:
        end -= 1
    part = 1 + max(text.rfind(mark, 0, end) for mark in "-_/")
    return text[: part or end]


def _plain(text: str) -> str:
    """Return text for one line: control characters escaped, others that are not printable, as ends of lines, spaces."""
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in escaped(text))


def _display_width(text: str) -> int:
    """Return a text's width on a terminal in characters (Unicode Standard Annex 11)."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.combining(each) > 0 for each in text)
