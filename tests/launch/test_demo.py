"""`clcomm demo`, with PyTorch and on clcomm's engine: equal hashes after two deaths, and the slow rank's name."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.tools import cli
from tests.faults.launch import ROOT, clean_environment
from tests.helpers import one_line

#: The command where PyTorch is not found.
WITHOUT_PYTORCH = """
import importlib.util as found, sys
find_spec = found.find_spec
found.find_spec = lambda name, *more: None if name == "torch" else find_spec(name, *more)
from clcomm.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""
pytestmark = pytest.mark.timing


@pytest.mark.parametrize("library", ["PyTorch", "clcomm's engine"])
def test_bits_outlast_two_deaths_and_a_slow_rank_is_named(tmp_path, library):
    if library == "PyTorch" and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    start = ["-m", "clcomm"] if library == "PyTorch" else ["-c", WITHOUT_PYTORCH]
    ended = subprocess.run(
        [sys.executable, *start, "demo", "--quick", "-o", "page.html"], cwd=tmp_path, capture_output=True, text=True,
        env=clean_environment(PYTHONPATH=str(ROOT)), timeout=400,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr
    undisturbed, killed = re.findall(r"[0-9a-f]{64}", ended.stdout)
    assert undisturbed == killed
    assert len(re.findall(r"rank \d died at step \d+ of SIGKILL", ended.stdout)) == 2
    assert "Rank 1 keeps the others waiting" in ended.stdout
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Rank 1 keeps the others waiting" in page
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(("words", "ranks", "expected"), [
    (["-o", "/proc/page.html"], 1, "-o: expected a file to write, got '/proc/page.html'"),
    ([], 2, "demo: expected to be outside mpiexec"),
])  # fmt: skip
def test_refused_before_anything_starts(monkeypatch, words, ranks, expected):
    monkeypatch.setattr("clcomm.tools.commands.demo.launched_ranks", lambda: ranks)
    with pytest.raises(ArgumentError) as caught:
        cli.main(["demo", *words])
    assert one_line(caught).startswith(expected)
