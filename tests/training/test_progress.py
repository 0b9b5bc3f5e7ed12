"""What is shown while a run goes on: figures, their choice by width, lines where there is no terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from training import progress
from training.communication_clock import CommunicationClock
from training.evaluate import Evaluation
from training.metrics import StepRecord
from training.progress import Figure, ProgressDisplay, fitting


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def record(step: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(step, 0, step, 32, loss, 0.1, 0.1, 0.0)


def run(display: ProgressDisplay, clock: Clock, steps: range, communication: CommunicationClock | None = None) -> None:
    """Take steps of 1/8 s, a quarter of which is communication."""
    for step in steps:
        clock.now_s += 0.125
        if communication is not None:
            communication.seconds += 0.03125
        display.step_finished(record(step))


def test_lines_come_every_few_seconds_and_at_the_end(clock: Clock) -> None:
    out, communication = io.StringIO(), CommunicationClock()
    display = ProgressDisplay(Console(file=out, width=120), 4, 120, 0, communication)
    run(display, clock, range(1, 81), communication)
    display.evaluation_finished(80, Evaluation(0.9725, 0.1, 1000))
    display.epoch_finished(0, 0.4567)
    run(display, clock, range(81, 121), communication)
    display.close()
    assert out.getvalue().splitlines() == [
        "step 40/120  loss 0.5000  1,024 images/s  communication 25%  0:10 left",
        "step 80/120  loss 0.5000  1,024 images/s  communication 25%  0:05 left",
        "epoch 1: mean training loss 0.4567; test accuracy 97.25%",
        "step 120/120  loss 0.5000  accuracy 97.25%  1,024 images/s  communication 25%",
    ]


def test_an_epoch_without_evaluation_tells_no_accuracy_of_old(clock: Clock) -> None:
    out = io.StringIO()
    display = ProgressDisplay(Console(file=out, width=120), 1, 40)
    run(display, clock, range(1, 3))
    display.evaluation_finished(2, Evaluation(0.9, 0.1, 10))
    run(display, clock, range(3, 5))
    display.epoch_finished(1, 0.25)
    assert out.getvalue() == "epoch 2: mean training loss 0.2500\n"


def test_the_time_left_follows_the_speed(clock: Clock) -> None:
    out = io.StringIO()
    display = ProgressDisplay(Console(file=out, width=120), 1, 100_000, 50_000)
    run(display, clock, range(50_001, 50_041))
    assert "  1:44:05 left" in out.getvalue()  # 49,960 steps
    assert out.getvalue().startswith("step 50040/100000  ")


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_the_bar_stays_on_one_line_of_any_terminal(clock: Clock, width: int) -> None:
    out, communication = io.StringIO(), CommunicationClock()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    display = ProgressDisplay(console, 4, 120, 0, communication)
    display.evaluation_finished(0, Evaluation(0.9725, 0.1, 1000))
    run(display, clock, range(1, 111), communication)
    display.close()
    shown = [line.strip() for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", out.getvalue()) if line.strip()]
    assert all(len(line) <= width for line in shown)
    assert "loss 0.5000" in shown[-1] and "110/120" in shown[-1]
    assert "comm 25%" in shown[-1]
    assert ("1,024 images/s" in shown[-1]) == (width >= 60)
    assert ("0:01 left" in shown[-1]) == (width >= 80)
    assert ("accuracy 97.25%  1,024 images/s  comm 25%  0:01 left" in shown[-1]) == (width >= 140)


def test_figures_are_left_out_from_the_least_telling_on() -> None:
    figures = [Figure(0, "aaa"), Figure(2, "bbb"), Figure(1, "ccc")]
    assert [fitting(figures, room) for room in (13, 12, 8, 7, 3, 2)] == [
        "aaa  bbb  ccc", "aaa  ccc", "aaa  ccc", "aaa", "aaa", "",
    ]  # fmt: skip
