"""`python -m tests.run`: every part runs whatever fails, and the last lines say what failed and what was skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    code, text = printed(folder, *arguments, drawn=drawn, workers=workers)
    return code, text.rpartition("\n\n")[2].splitlines()


def printed(folder: Path, *arguments: str, drawn: str, workers: int = 0) -> tuple[int, str]:
    """Return the exit code and all that the run prints."""
    for number in range(max(1, workers)):
        (folder / f"test_drawn{number or ''}.py").write_text(drawn)
    command = [sys.executable, "-m", "tests.run", "--ranks", "2", "--launch", mpiexec(), "--workers", str(workers)]
    tests = f"-p tests.conftest -c {ROOT / 'pyproject.toml'} --rootdir {folder} {folder}"
    ended = subprocess.run(
        [*command, "--record", str(folder / "outcomes"), *arguments],
        cwd=ROOT, env={**os.environ, "TEST_ARGS": tests}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return ended.returncode, ended.stdout


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


ONE_RANK_FAILS = """
import pytest
from clcomm.comm.transport.mpi_runtime import world

@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("number", range(3))
def test_that_fails_on_rank_1(number):
    print("a number of rank", world().Get_rank())
    assert number != 1 or world().Get_rank() != 1
    world().Barrier()
"""


@pytest.mark.parametrize("fails", [True, False])
def test_of_several_ranks_one_prints_what_happens_and_the_others_their_failures(tmp_path: Path, fails: bool) -> None:
    drawn = ONE_RANK_FAILS if fails else ONE_RANK_FAILS.replace("!= 1 or", "< 3 or")
    code, text = printed(tmp_path, "--no-plain", drawn=drawn)
    assert "MPI Information" not in text
    if fails:  # -x: rank 0 waits in the barrier, and the job ends
        assert code == 1 and text.splitlines()[-1] == "FAILED 2 ranks"
        assert text.count("rank 1: FAILED test_drawn.py::test_that_fails_on_rank_1[1] (call)") == 1
        assert "assert (1 != 1" in text and "a number of rank 1" in text and "a number of rank 0" not in text
    else:
        assert code == 0 and text.count("3 passed in") == 1 and text.count("...") == 1


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
