"""A report as JSON, CSV or Markdown."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import Any

from clcomm.report.elements import Table
from clcomm.report.report import SCHEMA, Report

#: The first characters of text that a spreadsheet would take for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


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


def _safe(value: Any) -> Any:
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
