"""A report as JSON, CSV or Markdown, and as one self-contained HTML page: no script, no network, light or dark."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files

from clcomm.insight.drawing.svg import as_svg
from clcomm.insight.report.chart_kinds import Chart
from clcomm.insight.report.elements import Table
from clcomm.insight.report.report import SCHEMA, Report

#: The first characters of text that a spreadsheet would take for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
# No text of a file can make the page fetch or run anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
#: Tables wider than this, in characters, take the page's whole width; cells of text wider than this are wrapped.
_WIDE_TABLE, _LONG_TEXT = 46, 24


def as_json(report: Report) -> str:
    """Return the report as JSON, with all values of all tables in seconds, bytes and shares; see docs/reports.md."""
    document = {
        "format": "clcomm report",
        "schema": SCHEMA,
        "title": report.title,
        "subtitle": report.subtitle,
        "figures": report.figures,
        "headline": report.headline,
        "tables": {table.key: list(table.rows) for table in report.tables},
        "charts": [{"kind": type(chart).__name__.lower(), **asdict(chart)} for chart in report.charts],
        "left_out": [{"what": each.what, "why": each.why} for each in report.left_out],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def as_csv(report: Report) -> str:
    """Return the tables as lines of table, row, field, value, one for each value that is set."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("table", "row", "field", "value"))
    for table in report.tables:
        for number, row in enumerate(table.rows):
            writer.writerows(
                (table.key, number, name, _safe(value)) for name, value in row.items() if value is not None
            )
    return text.getvalue()


def _safe(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def as_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    lines = [f"# {_escaped(report.title)}", ""]
    lines += [_escaped(report.subtitle), ""] if report.subtitle else []
    lines += [f"- {_escaped(line)}" for line in report.headline]
    for table in report.tables:
        lines += ["", f"## {_escaped(table.title)}", "", *_table_lines(table)]
        remarks = [_escaped(text) for text in (table.note, table.left_out) if text]
        lines += ["", " ".join(remarks)] if remarks else []
    if report.left_out:
        lines += ["", "## Left out", ""]
        lines += [f"- {_escaped(each.what)}: {_escaped(each.why)}" for each in report.left_out]
    return "\n".join(lines) + "\n"


def _table_lines(table: Table) -> list[str]:
    rule = ["---" if column.kind == "text" else "---:" for column in table.columns]
    rows = [[_escaped(cell) for cell in row] for row in table.cells()]
    heads = [_escaped(column.heading) for column in table.columns]
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in text)


def as_html(report: Report, script: str = "") -> str:
    """Return the report as an HTML page.

    script: JavaScript of clcomm's own, which may fetch from the page's server.
    """
    policy = _POLICY
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'; connect-src 'self'"
    style = files("clcomm.insight.report").joinpath("page.css").read_text(encoding="utf-8")
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="subtitle">{escape(report.subtitle)}</p>' if report.subtitle else "",
        _tiles(report),
        _list(report.headline, "headline") if report.headline else "",
        '<div class="charts">' if report.charts else "",
        *map(_chart, report.charts),
        "</div>" if report.charts else "",
        *_tables(report.tables),
    ]
    if report.left_out:
        body += [
            "<section><h2>Left out</h2>",
            _list([f"{each.what}: {each.why}" for each in report.left_out]),
            "</section>",
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(report.title)}</title>\n<style>\n{style}</style>\n</head>\n'
        "<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n"
        + (f"<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def _tiles(report: Report) -> str:
    tiles = (f"<div><b>{escape(tile.value)}</b> <span>{escape(tile.caption)}</span></div>" for tile in report.tiles)
    return f'<div class="tiles">{"".join(tiles)}</div>' if report.tiles else ""


def _list(lines: list[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if kind else f"<ul>{items}</ul>"


def _tables(tables: Sequence[Table]) -> list[str]:
    """Return the narrow tables in columns, then the wide ones one below another."""
    wide = [table for table in tables if _characters(table) > _WIDE_TABLE]
    narrow = [table for table in tables if table not in wide]
    found = ['<div class="tables">', *map(_table, narrow), "</div>"] if narrow else []
    return [*found, *map(_table, wide)]


def _characters(table: Table) -> int:
    """Return a table's approximate width in characters."""
    columns = zip(table.columns, zip(*table.cells(), strict=True), strict=True)
    widths = [max(len(column.heading), *map(len, cells)) for column, cells in columns]
    folded = [min(width, _LONG_TEXT) if column.kind == "text" else width
              for column, width in zip(table.columns, widths, strict=True)]  # fmt: skip
    return sum(folded) + 2 * len(folded)


def _table(table: Table) -> str:
    cells, title = table.cells(), escape(table.title)
    shown = max(0, len(cells) - table.folded)
    note = escape(" ".join(text for text in (table.note, table.left_out) if text))
    folded = (
        f"<details><summary>{escape(table.folded_as)}</summary>\n{_grid(table, cells[shown:])}</details>\n"
        if table.folded
        else ""
    )
    return (
        f'<section id="{escape(table.key)}"><h2>{title}</h2>\n'
        + (_grid(table, cells[:shown]) if shown else "")
        + (f"<p>{note}</p>\n" if note else "")
        + f"{folded}</section>"
    )


def _grid(table: Table, cells: list[list[str]]) -> str:
    kinds = ["text" if column.kind == "text" else "number" for column in table.columns]
    heads = "".join(
        f'<th scope="col" class="{kind}">{escape(column.heading)}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    rows = "".join(
        "<tr>" + "".join(f'<td class="{k}">{escape(cell)}</td>' for cell, k in zip(row, kinds, strict=True)) + "</tr>\n"
        for row in cells
    )
    head = f"<thead><tr>{heads}</tr></thead>\n" if any(column.heading for column in table.columns) else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>\n'
        f"{head}<tbody>\n{rows}</tbody></table></div>\n"
    )


def _chart(chart: Chart) -> str:
    scene = chart.scene()
    note = f" <span>{escape(scene.note)}</span>" if scene.note else ""
    wide = ' class="wide"' if scene.wide else ""
    return f"<figure{wide}><figcaption>{escape(scene.title)}{note}</figcaption>\n{as_svg(scene)}</figure>"
