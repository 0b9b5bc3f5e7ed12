"""The time from a process's start to its first step."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.report import build
from tests.report.runs import document, written
from training import first_steps
from training.first_steps import StartTimes, process_age_s


def test_a_process_knows_its_age():
    program = "import time; time.sleep(0.3)\n"
    program += "from training.first_steps import process_age_s; print(process_age_s())"
    begin = time.perf_counter()
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert 0.29 <= float(told.stdout) <= time.perf_counter() - begin + 0.02


def test_the_age_is_unknown_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(first_steps, "Path", lambda name: tmp_path / "missing")
    assert process_age_s() == 0.0


def test_each_part_begins_where_the_one_before_it_ended(monkeypatch):
    clock = iter([10.0, 12.0, 15.0, 99.0])
    monkeypatch.setattr(first_steps.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(first_steps, "process_age_s", lambda: 1.0)
    start = StartTimes()
    for part in ("program", "data", "program"):
        start.end(part)
    assert start.parts == {"program": 3.0, "data": 3.0}


@pytest.mark.parametrize("known", [True, False])
def test_a_report_names_the_slowest_ranks_start(tmp_path, known):
    whole = document(2)
    for record, seconds in zip(whole["ranks"], (0.5, 0.75), strict=True):
        record["start_s"] = {"program": 0.5, "first_step": seconds} if known else None
    said = build(read_runs(written(tmp_path, [whole]))).headline
    sentence = "The first step was complete 1.25 s after the start: program 0.50 s, first step 0.75 s."
    assert (sentence in said) is known
