"""`python -m tests.run`: every part runs whatever fails, and the last lines say what failed and what was skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.faults.launch import mpiexec

ROOT = Path(__file__).resolve().parent.parent
DRAWN = """
import pytest

def test_that_fails():
    assert False

def test_that_needs_pytorch():
    pytest.skip("PyTorch is not installed")

def test_that_needs_it_too():
    pytest.importorskip("torch.no_such_module")

def test_that_nobody_knows_how_to_run():
    pytest.skip("the moon is new")

@pytest.mark.mpi(min_size=2)
def test_on_ranks():
    pass

@pytest.mark.mpi(min_size=3)
def test_on_more_ranks():
    pass
"""


def run(folder: Path, *arguments: str, drawn: str = DRAWN, workers: int = 0) -> tuple[int, list[str]]:
    """Return the exit code and the last lines of a run over `drawn` alone, plain and on two ranks."""
    for number in range(max(1, workers)):
        (folder / f"test_drawn{number or ''}.py").write_text(drawn)
    command = [sys.executable, "-m", "tests.run", "--ranks", "2", "--launch", mpiexec(), "--workers", str(workers)]
    tests = f"-p tests.conftest -c {ROOT / 'pyproject.toml'} --rootdir {folder} {folder}"
    ended = subprocess.run(
        [*command, "--record", str(folder / "outcomes"), *arguments],
        cwd=ROOT, env={**os.environ, "TEST_ARGS": tests}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return ended.returncode, ended.stdout.rpartition("\n\n")[2].splitlines()


def test_a_failure_ends_no_run_before_its_end(tmp_path: Path) -> None:
    code, lines = run(tmp_path)
    assert code == 1
    assert [line.split()[:3] for line in lines[:2]] == [["plain", "failed", "0"], ["2", "ranks", "passed"]]
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "Skipped tests and files of tests:",
        "2 PyTorch is not installed: make test-torch",
        "1 the moon is new",
        "FAILED plain: test_drawn.py::test_that_fails",
    ]
    code, lines = run(tmp_path, "--only-skipped-for", "PyTorch")
    assert code == 0, lines
    assert lines[0].split()[:7] == ["plain", "passed", "0", "passed", "0", "failed", "2"], lines
    assert not any(line.startswith("2 ranks") for line in lines)


def test_without_a_run_before_nothing_was_skipped(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "--only-skipped-for", "PyTorch")
    assert code == 2 and lines[-1].endswith("was skipped for PyTorch: run `make test` first")


def test_a_process_that_ends_in_a_test_ends_the_plain_run_and_the_test_is_named(tmp_path: Path) -> None:
    ends = "import os\n\ndef test_first():\n    pass\n\ndef test_that_ends_it():\n    os._exit(1)\n"
    code, lines = run(tmp_path, "--ranks", drawn=ends, workers=2)
    assert code == 1
    assert re.fullmatch(r"FAILED plain: test_drawn1?\.py::test_that_ends_it", lines[-1]), lines


LEAVES = """
import signal, subprocess

left = []

def test_that_leaves_processes():
    left.extend(subprocess.Popen(["sleep", "600"]) for _ in range(2))
    assert False

def test_that_collects_them():
    assert left.pop().wait(10) == -signal.SIGKILL
    left.clear()  # a ResourceWarning: its process is not waited for
"""


def test_processes_that_a_failed_test_leaves_are_ended_and_are_no_later_tests_failure(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "--ranks", drawn=LEAVES)
    assert lines[0].split()[:5] == ["plain", "failed", "1", "passed", "1"], lines
    assert lines[1:] == ["FAILED plain: test_drawn.py::test_that_leaves_processes"]


TIMED = """
import pathlib
import pytest

def looked(name):
    seen = pathlib.Path(__file__).with_name(name)
    seen.write_text("again" if seen.exists() else "once")
    return seen.read_text()

@pytest.mark.timing
def test_that_looks_too_early():
    assert looked("timed") == "again"

def test_without_the_mark():
    assert looked("other") == "again"
"""


def test_what_is_marked_timing_runs_once_more_and_is_counted(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "--ranks", drawn=TIMED)
    assert code == 1 and lines[0].split()[:5] == ["plain", "failed", "1", "passed", "1"], lines
    assert lines[1:] == [
        "FAILED plain: test_drawn.py::test_without_the_mark",
        "1 failed once and ran again: plain: test_drawn.py::test_that_looks_too_early",
    ]
