"""Files that were written before reports had timelines, histories and versions still make whole reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clcomm import cli
from clcomm.errors import DataError
from clcomm.report import build, read_runs
from clcomm.report.text_formats import as_json
from tests.report.families import KINDS, Kind, drawn

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


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_file_of_schema_3_makes_the_same_report(tmp_path: Path, kind: Kind, ranks: int) -> None:
    """In schema 3 `wait_unknown_ns` was `untold_ns`; each rank's file may be of either schema."""
    new = drawn(kind, ranks)
    old = {**json.loads(json.dumps(new).replace('"wait_unknown_ns"', '"untold_ns"')), "schema": 3}
    assert '"untold_ns"' in json.dumps(old)
    expected = _report(tmp_path / "new.json", new)
    assert _report(tmp_path / "old.json", old) == expected
    mixed = [new if record["rank"] % 2 else old for record in new["ranks"]]
    for number, document in enumerate(mixed):
        part = {**document, "ranks": [document["ranks"][number]]}
        (tmp_path / f"{number}.json").write_text(json.dumps(part))
    assert as_json(build(read_runs([str(tmp_path / f"{number}.json") for number in range(len(mixed))]))) == expected


def test_time_that_is_waiting_or_moving_is_read_from_a_file_of_schema_3(tmp_path: Path) -> None:
    """The kinds above would agree too if both files lost it."""
    text = json.dumps({**drawn(Kind("mpi", transport="mpi", knows_wait=False, overlap=True), 2), "schema": 3})
    (tmp_path / "old.json").write_text(text.replace('"wait_unknown_ns"', '"untold_ns"'))
    assert read_runs([str(tmp_path / "old.json")]).stats().total("all_reduce")["wait_unknown_s"] > 0


@pytest.mark.parametrize(("schema", "name"), [(4, "untold_ns"), (2, "untold_ns"), (5, "wait_unknown_ns")])
def test_an_old_name_counts_in_its_own_schema_alone(tmp_path: Path, schema: int, name: str) -> None:
    text = json.dumps({**drawn(KINDS[0], 2), "schema": schema}).replace('"wait_unknown_ns"', f'"{name}"')
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DataError, match="wait_unknown_ns" if schema == 4 else f"schema: expected 3 or 4, got {schema}"):
        read_runs([str(tmp_path / "run.json")])


def _report(path: Path, document: dict[str, Any]) -> str:
    path.write_text(json.dumps(document))
    return as_json(build(read_runs([str(path)])))


def test_it_is_compared_with_a_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.json"
    new.write_text(json.dumps(drawn(KINDS[0], 2)))
    for files in ([OLD, new], [new, OLD]):
        assert cli.main(["compare", *map(str, files), "--format", "json"]) == 0
        assert {each["figure"] for each in json.loads(capsys.readouterr().out)["pairs"][0]["figures"]} >= {"steps/s"}
