"""The tables of a slow link, from courses that are done: the first test at or below each loss, and the bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import slow_link
from benchmarks.harness import Report

#: By policy the losses after 25, 50, ... steps, and the seconds of a step, of which half is waiting.
COURSES = {"none": ((3.5, 2.9, 2.8), 4.0), "local:h=5": ((3.6, 3.1, 2.89, 2.9), 0.1), "demo:32": ((3.5, 2.8), 1.0)}


def test_seconds_to_each_loss_are_compared_with_plains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for policy, (losses, step_s) in COURSES.items():
        course = [
            {"steps": steps, "loss": loss, "load": 1.0 + step_s, "seconds": steps * step_s,
             "waited_s": steps * step_s / 2, "processor_s": steps * 0.02}
            for steps, loss in zip(range(25, 101, 25), losses, strict=False)
        ]  # fmt: skip
        (tmp_path / f"{policy}-2-2-25-0.002-50-10-5-0.json").write_text(json.dumps(course))
    given = ["--kept", str(tmp_path), "--jitter-ms", "5", "--policies", "local:h=5", "demo:32"]
    monkeypatch.setattr(sys, "argv", ["slow_link", *given])
    monkeypatch.setattr(slow_link, "refusal", lambda: "a test of tables trains nothing")
    reports: list[Report] = []
    monkeypatch.setattr(slow_link.harness, "conclude", lambda report, console, record: reports.append(report))
    slow_link.main()
    first, second = reports[0].grids
    assert first.title == "to a held-out loss of 2.9, 2 + 2 ranks, 50 +- 5 ms each way, 10 Mbit/s"
    assert first.rows == [
        ("none", "50", "200.0", "100.0", "4000", "20", "1.0x"),
        ("local:h=5", "75", "7.5", "3.8", "100", "20", "26.7x"),
        ("demo:32", "50", "50.0", "25.0", "1000", "20", "4.0x"),
    ]
    assert second.rows[1] == ("local:h=5", "over 100", "not reached", "not reached", "", "", "")
    reached = {bar.what: bar.reached for bar in reports[0].bars}
    assert reached == {
        "local:h=5: to a loss of 2.9 sooner than none": True, "demo:32: to a loss of 2.9 sooner than none": False,
        "demo:32: to a loss of 2.8 sooner than none": False,
    }  # fmt: skip
    assert reports[0].notes == ["load average of the machine meanwhile: 1.1 to 5.0"]
