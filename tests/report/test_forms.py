"""Every form of a report is whole, and what files say is markup in none of them."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from rich.console import Console

from benchmarks import example_report
from clcomm.insight.report import formats
from clcomm.insight.report.elements import MOST_SHOWN, Column, Table
from clcomm.insight.report.formats import as_html
from clcomm.insight.report.report import Report, show
from tests.report.conftest import reported, table
from tests.report.runs import LAYOUT, STEPS


def shown(report: Report, width: int = 120) -> str:
    text = io.StringIO()
    show(report, Console(width=width, file=text, highlight=False))
    return text.getvalue()


def test_the_page_that_reads_a_report_takes_its_parts_from_one(report):
    page = example_report.PAGE.read_text()
    filled = example_report.filled(page, shown(report))
    parts = re.findall(r"<!-- report: (.*) -->\n```\n(.*)\n", filled)
    titles = {table.title for table in report.tables} | {"first"}
    assert {name for name, _ in parts} <= titles | {"Left out", "Decisions"}  # this run has made no decision
    assert all(line == (report.title if name == "first" else name) for name, line in parts if name in titles)
    assert example_report.filled(filled, shown(report)) == filled  # taken again it is replaced, and nothing else
    assert re.sub(r"```.*?```", "", filled, flags=re.DOTALL) == re.sub(r"```.*?```", "", page, flags=re.DOTALL)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_shows_every_cell_at_any_width(report, width):
    text = shown(report, width)
    assert max(len(line) for line in text.splitlines()) <= width
    words = " ".join(text.split())
    assert all(" ".join(line.split()) in words for line in report.headline)
    for each in report.tables:
        assert each.title in text
        numbers = [index for index, column in enumerate(each.columns) if column.kind != "text"]
        assert all(row[index] in text for row in each.cells() for index in numbers)
        assert all(word in text for row in each.cells() for cell in row for word in cell.split())


def test_markdown_has_all_tables_and_no_live_markup(tmp_path):
    text = formats.as_markdown(reported(tmp_path, model="a|b *c* <d>"))
    assert text.startswith("# a\\|b \\*c\\* \\<d\\> on mnist, 4 ranks\n")
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(blocks) >= 9
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_json_is_whole_and_plain(report):
    found = json.loads(formats.as_json(report))
    assert (found["format"], found["schema"], found["headline"]) == ("clcomm report", 2, report.headline)
    assert found["tables"]["buckets"] == json.loads(json.dumps(table(report, "buckets").rows))
    assert {chart["kind"] for chart in found["charts"]} == {"bars", "distribution", "points"}


def test_csv_has_every_value(tmp_path):
    report = reported(tmp_path, decisions=[])
    rows = list(csv.DictReader(formats.as_csv(report).splitlines()))
    sizes = {row["row"]: row["value"] for row in rows if row["table"] == "buckets" and row["field"] == "bytes"}
    assert sizes == {str(index): str(STEPS * sum(bucket)) for index, bucket in enumerate(LAYOUT)}
    assert {row["table"] for row in rows} == {each.key for each in report.tables}


def test_a_spreadsheet_takes_no_text_for_a_formula():
    hostile = Table("t", "T", [Column("a", "A", "text")], [{"a": "=1+1"}, {"a": "@x"}, {"a": "fine"}])
    lines = formats.as_csv(Report("t", {}, [], [], [hostile], [], [])).splitlines()
    assert lines[1:] == ["t,0,a,'=1+1", "t,1,a,'@x", "t,2,a,fine"]


def test_html_escapes_what_files_say(tmp_path):
    page = as_html(reported(tmp_path, model="<script>alert(1)</script>", dataset='"><img src=x>'))
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page


def test_long_tables_say_what_they_leave_out():
    long = Table("t", "T", [Column("n", "N")], [{"n": number} for number in range(MOST_SHOWN + 1)])
    assert (
        len(long.cells()) == MOST_SHOWN
        and long.left_out == f"{MOST_SHOWN} of {MOST_SHOWN + 1} rows; JSON and CSV have all."
    )
