"""A report on a terminal, with rich."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from clcomm.report.model import Report
from clcomm.report.shapes import Table

#: Text longer than this may be folded.
_LONG_TEXT = 40


def show(report: Report, console: Console) -> None:
    """Print the report; tables too wide for the console are cut into pieces that repeat the first column."""
    console.print(Text(report.title, "bold"))
    for line in report.headline:
        console.print(Text(_item(line, console.width)))
    for table in report.tables:
        console.print()
        _print_table(table, console)
    if report.left_out:
        console.print(Text("\nLeft out", "bold"))
        for each in report.left_out:
            console.print(Text(_item(f"{each.what}: {each.why}", console.width)))


def _item(line: str, width: int) -> str:
    return textwrap.fill(f"- {line}", width, subsequent_indent="  ", break_on_hyphens=False)


def _print_table(table: Table, console: Console) -> None:
    cells = table.cells()
    console.print(Text(table.title, "bold"))
    for columns in _pieces(table, cells, console.width):
        drawn = RichTable(box=None, header_style="dim", pad_edge=False, collapse_padding=True)
        drawn.show_header = any(table.columns[index].heading for index in columns)
        for index in columns:
            heading, kind = table.columns[index].heading, table.columns[index].kind
            is_text = kind == "text"
            drawn.add_column(Text(heading), justify="left" if is_text else "right", no_wrap=not is_text)
        for row in cells:
            drawn.add_row(*(Text(row[index]) for index in columns))
        console.print(drawn)
    for note in (table.note, table.left_out):
        if note:
            console.print(Text(note, "dim"))


def _pieces(table: Table, cells: list[list[str]], width: int) -> list[list[int]]:
    """Return the columns of each piece, by index: as many as fit, after those that name the row."""
    widths = [max(map(len, column)) + 1 for column in zip([c.heading for c in table.columns], *cells, strict=True)]
    widths = [min(w, _LONG_TEXT) if c.kind == "text" else w for w, c in zip(widths, table.columns, strict=True)]
    naming = [index for index, column in enumerate(table.columns) if index == 0 or column.key == "label"]
    pieces: list[list[int]] = [[]]
    for index in range(len(table.columns)):
        if pieces[-1] and sum(widths[i] for i in {*naming, *pieces[-1], index}) - 1 > width:
            pieces.append(list(naming))
        if index not in pieces[-1]:
            pieces[-1].append(index)
    return pieces
