"""`clcomm compare`: its forms, its warning about machines, and the threshold that fails a build."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from clcomm.base.errors import ArgumentError, DataError
from clcomm.insight.report.comparison_report import comparison_report, warnings
from clcomm.insight.report.differences import pairs
from clcomm.insight.report.report import MACHINE, provenance
from clcomm.tools import cli
from tests.report.runs import document
from tests.report.test_differences import estimates, stored, stored_comparison

#: A change of the machine, as what each rank's record then says.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "hosts": {"host_name": "south"}, "cores": {"cpus": "0-1"}, "device": {"device": "gpu:0"},
    "driver": {"driver": "other 2"}, "MPI": {"MPI": "Open MPI 5.0.8"}, "Python": {"Python": "3.14.0"},
    "numpy": {"numpy": "1.0"}, "mpi4py": {"mpi4py": "3.0"}, "pyopencl": {"pyopencl": "2020.1"},
}  # fmt: skip
VERSIONS = {"clcomm": "1", "Python": "3.11.7", "MPI": "MPICH 5.0.2", "numpy": "2", "mpi4py": "4", "pyopencl": "2026"}


def on_machine(path: Path, what: str = "", **figures: Any) -> str:
    """Write a run whose machine differs in `what`."""
    whole = document(2, **figures)
    change = ELSEWHERE.get(what, {})
    for record in whole["ranks"]:
        versions = {**VERSIONS, **{name: value for name, value in change.items() if name in VERSIONS}}
        own = {name: value for name, value in change.items() if name not in VERSIONS}
        record.update({"device": "cpu", "driver": "pocl", "versions": versions, **own})
    path.write_text(json.dumps(whole))
    return str(path)


@pytest.mark.parametrize("what", MACHINE)
def test_a_machine_that_differs_is_named_in_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    first, second = on_machine(tmp_path / "a.json"), on_machine(tmp_path / "b.json", what)
    for form in ("terminal", "markdown", "json", "csv", "html"):
        assert cli.main(["compare", first, second, "--format", form]) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(rf"b\.json.*a\.json.*machines differ.*: {what} ", line)
    page = tmp_path / "c.html"
    assert cli.main(["compare", first, second, "-o", str(page)]) == 0
    assert f"machines differ, and times with them: {what} " in page.read_text()


def test_the_same_machine_and_old_files_give_no_warning(tmp_path: Path) -> None:
    first, second = on_machine(tmp_path / "a.json"), on_machine(tmp_path / "b.json")
    assert warnings(pairs([first, second])) == []
    old = json.loads(Path(first).read_text())
    for record in old["ranks"]:
        for name in ("device", "driver", "versions", "timeline", "cpus"):
            record.pop(name, None)
    for name in ("date", "history"):
        old.pop(name, None)
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert warnings(pairs([first, str(tmp_path / "old.json")])) == []  # what a file does not say is no difference


def test_both_runs_provenance_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = on_machine(tmp_path / "a.json"), on_machine(tmp_path / "b.json", "MPI")
    assert cli.main(["compare", first, second]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = json.loads(_json(capsys, first, second))["pairs"][0]
    for side, path in (("before", first), ("after", second)):
        ((before, after),) = pairs([first, second])
        known = provenance((before if side == "before" else after).run)
        assert found[side]["provenance"] == known and found[side]["file"] == path
        for name in ("batch", "bucket size", "transport", "engine", "device", "driver", "cores", "hosts", "MPI",
                     "Python", "numpy", "mpi4py", "pyopencl", "clcomm", "date", "training loss"):  # fmt: skip
            assert known[name] and known[name] in shown, name


def _json(capsys: pytest.CaptureFixture[str], *files: str) -> str:
    assert cli.main(["compare", *files, "--format", "json"]) == 0
    return capsys.readouterr().out


def test_json_has_numbers_and_the_page_has_all_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = stored(tmp_path / "a.json", intervals=estimates(10.0, 0.05), bucket_size=1 << 20)
    second = stored(tmp_path / "b.json", intervals=estimates(12.5, 0.05), bucket_size=None)
    found = json.loads(_json(capsys, first, second))
    assert (found["format"], found["schema"]) == ("clcomm compare", 1)
    figures = {each["figure"]: each for each in found["pairs"][0]["figures"]}
    step = figures["step (ms)"]
    assert step["before"] == {"median": 10.0, "low": 9.5, "high": 10.5}
    assert step["relative"] == pytest.approx(0.25) and step["verdict"] == "more than noise"
    assert {"figure": "bucket_size", "before": "1 MiB", "after": "none"} in found["pairs"][0]["settings"]
    report = comparison_report(pairs([first, second]))
    assert "25.0% longer" in report.headline[0] and "more than noise" in report.headline[0]
    page = tmp_path / "c.html"
    assert cli.main(["compare", first, second, "-o", str(page)]) == 0
    text = page.read_text()
    assert all(cell in text for table in report.tables for row in table.cells() for cell in row)
    assert {chart.title for chart in report.charts} >= {"A step", "Communicating in a step"}


@pytest.mark.parametrize(
    ("ratio", "spread", "allowed"),
    [*itertools.product((0.5, 0.97, 1.0, 1.03, 1.049, 1.051, 1.2, 3.0), (0.0, 0.01, 0.2), (0, 5, 12.5))],
)
def test_a_build_fails_where_a_step_is_slower_by_more_than_noise_and_more_than_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ratio: float, spread: float, allowed: float
) -> None:
    first = stored(tmp_path / "a.json", intervals=estimates(10.0, spread))
    second = stored(tmp_path / "b.json", intervals=estimates(10.0 * ratio, spread))
    apart = 10.0 * ratio * (1 - spread) > 10.0 * (1 + spread)
    expected = apart and ratio - 1 > allowed / 100
    assert cli.main(["compare", first, second, "--fail-if-slower", f"{allowed}%"]) == (3 if expected else 0)
    said = capsys.readouterr().err
    assert (f"b.json: a step takes {ratio - 1:.1%} longer" in said and f"allowed is {allowed:g}%" in said) == expected


@pytest.mark.parametrize(("low", "high", "code"), [(1.06, 1.3, 3), (0.98, 1.3, 0), (1.001, 1.3, 3)])
def test_runs_that_took_turns_are_judged_by_their_ratio(tmp_path: Path, low: float, high: float, code: int) -> None:
    path = Path(stored_comparison(tmp_path / "a.json", {"per tensor": 10.0, "mpi": 11.0}, spread=0.5))
    text = json.loads(path.read_text())
    text["variants"]["mpi"]["step_ratio"] = {"median": 1.1, "low": low, "high": high}
    path.write_text(json.dumps(text))
    assert cli.main(["compare", str(path), "--fail-if-slower", "5"]) == code


def test_without_intervals_nothing_passes(tmp_path: Path) -> None:
    first, second = stored(tmp_path / "a.json", intervals=estimates(10.0, 0.05)), stored(tmp_path / "b.json")
    with pytest.raises(DataError, match=r"b\.json: expected intervals of a step's time"):
        cli.main(["compare", first, second, "--fail-if-slower", "5%"])
    with pytest.raises(DataError, match=r"b\.json: expected intervals of a step's time"):
        cli.main(["compare", second, first, "--fail-if-slower", "5%"])


@pytest.mark.parametrize("text", ["", "fast", "-5%", "5%%", "nan", "1e3"])
def test_a_threshold_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"argument --fail-if-slower: expected a percentage such as 5%, got "):
        cli.main(["compare", "a.json", f"--fail-if-slower={text}"])
