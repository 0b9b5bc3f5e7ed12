"""Files that were written before reports had timelines, histories and versions still make whole reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clcomm import cli
from clcomm.report import build, read_runs
from tests.report.families import KINDS, drawn

#: What clcomm 0.1.0 wrote at the end of 3 steps on 2 ranks, its summary left out.
OLD = Path(__file__).parent / "written-before.json"


@pytest.mark.parametrize("form", ["terminal", "markdown", "json", "csv", "html"])
def test_an_old_file_is_read_in_every_form(capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert cli.main(["report", str(OLD), "--format", form]) == 0
    shown = capsys.readouterr()
    assert "convnet" in shown.out and "32 a rank, 64 in all" in shown.out and shown.err == ""


def test_what_it_does_not_hold_is_left_out() -> None:
    report = build(read_runs([str(OLD)]))
    assert {type(chart).__name__ for chart in report.charts} == {"Bars", "Distribution"}
    (table,) = (each for each in report.tables if each.key == "provenance")
    known = {row["what"]: row["value"] for row in table.rows}
    assert known["batch"] == "32 a rank, 64 in all" and known["hosts"] == "north" and "device" not in known
    assert [row["ok"] for each in report.tables if each.key == "checks" for row in each.rows] == ["yes", "yes"]


def test_it_is_compared_with_a_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.json"
    new.write_text(json.dumps(drawn(KINDS[0], 2)))
    for files in ([OLD, new], [new, OLD]):
        assert cli.main(["compare", *map(str, files), "--format", "json"]) == 0
        assert {each["figure"] for each in json.loads(capsys.readouterr().out)["pairs"][0]["figures"]} >= {"steps/s"}
