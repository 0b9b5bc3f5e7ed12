"""The harness's arithmetic, its tables, and jobs that answer; nothing here is timed."""

from __future__ import annotations

import sys
from datetime import date
from io import StringIO

import pytest
from rich.console import Console

from benchmarks import harness, machine, results_file, workers
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from clcomm.base.errors import ArgumentError, LaunchError


def test_median_and_range_of_samples():
    samples = Samples((5.0, 1.0, 2.0, 9.0))
    assert (samples.median, samples.low, samples.high) == (3.5, 1.0, 9.0)


def test_samples_need_a_value():
    with pytest.raises(ArgumentError, match="at least one value"):
        Samples(())


def test_ratio_is_the_median_of_the_rounds_with_their_range():
    ratio = Ratio.of(Samples((10.0, 30.0, 20.0)), Samples((10.0, 10.0, 4.0)))
    assert (ratio.value, ratio.low, ratio.high) == (3.0, 1.0, 5.0)
    assert str(ratio) == "3.00x (1.00-5.00)"


def test_ratio_needs_the_same_rounds():
    with pytest.raises(ArgumentError, match="as many on both sides"):
        Ratio.of(Samples((1.0,)), Samples((1.0, 2.0)))


def test_windows_alternate_and_warm_up_does_not_count():
    calls: list[str] = []

    def measure(name: str, values: list[float]):
        def once() -> float:
            calls.append(name)
            return values.pop(0)

        return once

    shown: list[str] = []
    result = harness.alternate(
        {"a": measure("a", [100.0, 1.0, 2.0]), "b": measure("b", [100.0, 3.0, 4.0])}, 2, warm_up=1, show=shown.append
    )
    assert "".join(calls) == "baabba", "each round begins with another one"
    assert result == {"a": Samples((1.0, 2.0)), "b": Samples((3.0, 4.0))}
    assert shown == ["warming up", "window 1 of 2", "window 2 of 2"]


def test_no_windows_are_refused():
    with pytest.raises(ArgumentError, match="windows"):
        harness.alternate({}, 0)


@pytest.mark.parametrize(("each_s", "expected"), [(0.1, 10), (0.3, 3), (5.0, 2), (0.0, 2)])
def test_repeats_fill_a_window(each_s, expected):
    assert harness.repeats_for(each_s, 1.0, least=2) == expected


@pytest.mark.parametrize("each_s", [1e-6, 3e-4, 0.004, 2.0])
@pytest.mark.parametrize("first_s", [0.0, 0.03, 5.0])
def test_repeats_that_fill_a_window_leave_out_what_first_runs_cost(each_s, first_s):
    """Every other run costs more, however many repetitions it has."""
    counts: list[int] = []

    def seconds(repeats: int) -> float:
        counts.append(repeats)
        return repeats * each_s + first_s * (len(counts) % 2)

    assert harness.repeats_that_fill(seconds, 0.02) == max(1, round(0.02 / each_s))
    assert sum(counts) * each_s <= max(0.08, 2 * each_s), "few windows in all"


def test_best_has_the_highest_median():
    samples = {"a": Samples((1.0, 9.0, 1.0)), "b": Samples((2.0, 2.0, 2.0)), "c": Samples((5.0, 5.0, 5.0))}
    assert harness.best_of(samples, ["a", "b"]) == "b"
    assert harness.best_of(samples, list(samples)) == "c"


def test_bars_on_both_sides():
    assert Bar("speed", 2.0, 2.0).reached
    assert not Bar("speed", 1.99, 2.0).reached
    assert Bar("start", 1.5, 2.0, " s", at_least=False).reached
    assert str(Bar("start", 2.5, 2.0, " s", at_least=False)) == "start: 2.5 s, at most 2 s asked for: missed"


def test_a_row_has_as_many_cells_as_the_table_columns():
    with pytest.raises(ArgumentError, match="expected 2 cells, got 1"):
        Grid("t", ("a", "b")).add("1")


def make_report() -> Report:
    grid = Grid("Speed", ("system", "images/s"))
    grid.add("a|b", "1,000")
    return Report("peers", "python -m benchmarks.peers", [grid], [Bar("ratio", 3.0, 2.0)], ["batch 64"])


def test_markdown_of_a_report():
    text = make_report().markdown(date(2024, 5, 6))
    lines = text.splitlines()
    assert lines[0] == "## 2024-05-06: peers"
    assert "`python -m benchmarks.peers`" in lines
    assert "| system | images/s |" in lines
    assert "| --- | ---: |" in lines
    assert "| a\\|b | 1,000 |" in lines
    assert lines[-2:] == ["- batch 64", "- ratio: 3x, at least 2x asked for: reached"]
    assert f"{machine.cores()} core" in text
    assert "numpy " in text


def test_a_record_takes_the_place_of_the_same_commands_on_such_a_machine(tmp_path, monkeypatch):
    path, history = tmp_path / "RESULTS.md", tmp_path / "HISTORY.md"
    first, other, again = make_report(), make_report(), make_report()
    other.command += " --ranks 2"
    again.command, again.notes = again.command + " --windows 3 --record", ["anew"]
    for report in (first, other):
        report.record(path)
    assert not history.exists()
    for report in (again, other):
        report.record(path)
    text = path.read_text()
    assert text.startswith("# Results\n") and text.count("# Results\n") == 1
    assert text.count(": peers\n") == 2 and text.count("- anew\n") == text.count("--ranks 2`\n") == 1
    assert text.index("- anew\n") < text.index("--ranks 2`\n")
    assert "\n\n\n" not in text and text.endswith("reached\n")
    assert history.read_text().count(": peers\n") == 1 and "- anew\n" not in history.read_text()
    monkeypatch.setattr(harness, "describe_machine", lambda: "another machine")
    first.record(path)
    assert path.read_text().count(": peers\n") == 3 and history.read_text().count(": peers\n") == 1


def test_the_top_of_the_results_lists_runs_and_missed_bars(tmp_path):
    path, report = tmp_path / "RESULTS.md", make_report()
    report.bars.append(Bar("a bar", 1.0, 2.0))
    report.record(path)
    head = path.read_text().partition("\n## ")[0]
    assert f"- `peers`, {machine.describe_machine()}: a bar: 1x, at least 2x\n" in head
    assert f"| `peers` | {machine.describe_machine()} | {date.today().isoformat()} | 1 of 2 |" in head
    make_report().record(tmp_path / "fine.md")
    assert "Missed bars" not in (tmp_path / "fine.md").read_text()


def test_the_projects_own_results_are_as_a_record_leaves_them(tmp_path):
    copy = tmp_path / "RESULTS.md"
    copy.write_bytes(results_file.RESULTS.read_bytes())
    results_file.record(results_file.read(copy)[-1].text, copy)
    assert copy.read_bytes() == results_file.RESULTS.read_bytes()


def test_a_report_shows_tables_notes_and_bars():
    out = StringIO()
    make_report().show(Console(file=out, width=100))
    shown = out.getvalue()
    for expected in ("Speed", "images/s", "1,000", "batch 64", "reached"):
        assert expected in shown


def test_command_is_what_one_would_type(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["somewhere/__main__.py", "--windows", "2"])
    assert harness.command_line("benchmarks.peers") == "python -m benchmarks.peers --windows 2"


ECHO = """
import os, sys
from benchmarks.workers import serve
rank = int(os.environ["RANK"])
def handle(request):
    if request["do"] == "fail" and rank == 1:
        raise SystemExit("rank 1 gave up")
    return {"rank": rank, "size": os.environ["WORLD_SIZE"], "got": request["do"], "arguments": sys.argv[2:]}
serve(sys.argv[1], rank, handle)
"""


@pytest.fixture
def echo_module(tmp_path, monkeypatch):
    (tmp_path / "echo_worker.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echo_worker"


def test_every_rank_of_a_job_answers(echo_module):
    with workers.Job(echo_module, "x", ranks=3, mpi=False) as job:
        for what in ("first", "second"):
            assert job.ask(do=what) == [
                {"rank": rank, "size": "3", "got": what, "arguments": ["x"]} for rank in range(3)
            ]


def test_a_rank_that_ends_early_is_reported_with_its_last_words(echo_module):
    with workers.Job(echo_module, ranks=2, mpi=False) as job, pytest.raises(LaunchError, match="rank 1 gave up"):
        job.ask(do="fail")


def test_a_job_that_never_starts_is_reported(monkeypatch, tmp_path):
    (tmp_path / "broken_worker.py").write_text("raise SystemExit('no such thing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no such thing"):
        workers.Job("broken_worker", ranks=1, mpi=False)


def test_the_last_line_counts_the_bars_that_hold_here():
    report = Report("a title", "a command")
    report.bars = [Bar("as fast", 1.5, 1.0), Bar("as small", 3.0, 2.0, "%", at_least=False), Bar("far", 0.0, 1.0)]
    where = f"on this machine ({machine.describe_machine()})"
    assert report.verdict() == f"{where} 1 of 3 bars hold; missed: as small; far"
    text = StringIO()
    report.show(Console(file=text, soft_wrap=True, width=300))
    assert text.getvalue().splitlines()[-1] == report.verdict()
    report.bars = report.bars[:1]
    assert report.verdict() == f"{where} 1 of 1 bars hold"
