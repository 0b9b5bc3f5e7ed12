"""A report on a terminal, with Rich."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.insight.report.elements import Table
from clcomm.insight.report.report import Report


def show(report: Report, console: Console) -> None:
    """Print the report; tables wider than the console are split into pieces that repeat the first column."""
    console.print(Text(report.title, "bold"))
    if report.subtitle:
        console.print(Text(textwrap.fill(report.subtitle, console.width, break_on_hyphens=False), "dim"))
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
        console.print(_piece(table, cells, columns))
    for note in (table.note, table.left_out):
        if note:
            console.print(Text(note, "dim"))


def _piece(table: Table, cells: list[list[str]], columns: list[int]) -> TextTable:
    shown = [(table.columns[index].heading, table.columns[index].kind != "text") for index in columns]
    return TextTable([TextColumn(*each) for each in shown], [[row[index] for index in columns] for row in cells])


def _pieces(table: Table, cells: list[list[str]], width: int) -> list[list[int]]:
    """Return the column indices of each piece: those that name the row, then as many others as fit."""
    naming = [index for index, column in enumerate(table.columns) if index == 0 or column.key == "label"]
    pieces = [list(naming)]
    for index in range(len(table.columns)):
        if index in naming:
            continue
        if pieces[-1] != naming and _piece(table, cells, [*pieces[-1], index]).layout(width) is None:
            pieces.append(list(naming))
        pieces[-1].append(index)
    return pieces
