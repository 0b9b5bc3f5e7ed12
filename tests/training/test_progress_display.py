"""What is shown while a run goes on: figures, their choice by width, lines where there is no terminal."""

from __future__ import annotations

import io
import re
import sys
from itertools import pairwise

import pytest
from rich.console import Console

from training import progress_display
from training.communication_clock import CommunicationClock
from training.evaluate import Evaluation
from training.live_line import LiveLine
from training.metrics import WARM_UP_STEPS, StepRecord
from training.progress_display import WINDOW_S, Figure, ProgressDisplay, fitting


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_display, "time", made)
    return made


def record(step: int, loss: float = 0.5, seconds: float = 0.125) -> StepRecord:
    return StepRecord(step, 0, step, 32, loss, 0.1, seconds, 0.0)


def run(display: ProgressDisplay, clock: Clock, steps: range, communication: CommunicationClock | None = None) -> None:
    """Take steps of 1/8 s, a quarter of which is communication."""
    for step in steps:
        clock.now_s += 0.125
        if communication is not None:
            communication.seconds += 0.03125
        display.step_finished(record(step))


def test_lines_come_every_few_seconds_and_at_the_end(clock: Clock) -> None:
    out, communication = io.StringIO(), CommunicationClock()
    display = ProgressDisplay(Console(file=out, width=120), 4, 120, 0, communication, epochs=2)
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
    display.epoch_finished(1, 0.3456)
    assert "0.3456" not in out.getvalue()  # which the line of the result says


def test_the_first_steps_of_lines_do_not_count_towards_the_time_left(clock: Clock) -> None:
    """They build kernels."""
    out = io.StringIO()
    display = ProgressDisplay(Console(file=out, width=120), 1, 200)
    clock.now_s += 16
    display.step_finished(record(1, seconds=16))
    run(display, clock, range(2, 101))
    first, *others = out.getvalue().splitlines()
    assert "left" not in first
    assert [line.rpartition("  ")[2] for line in others] == ["0:20 left", "0:15 left"]


def test_an_epoch_without_evaluation_tells_no_accuracy_of_old(clock: Clock) -> None:
    out = io.StringIO()
    display = ProgressDisplay(Console(file=out, width=120), 1, 40, epochs=3)
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
def test_the_live_line_stays_on_one_line_of_any_terminal(clock: Clock, width: int) -> None:
    out, communication = io.StringIO(), CommunicationClock()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    display = ProgressDisplay(console, 4, 120, 0, communication)
    display.evaluation_finished(0, Evaluation(0.9725, 0.1, 1000))
    run(display, clock, range(1, 111), communication)
    display.close()
    shown = [line.strip() for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", out.getvalue()) if line.strip()]
    assert all(len(line) < width for line in shown) and "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")  # the terminal is left as it was
    assert "loss 0.5000" in shown[-1] and "110/120" in shown[-1]
    assert "comm 25%" in shown[-1]
    assert ("1,024 images/s" in shown[-1]) == (width >= 60)
    assert ("0:01 left" in shown[-1]) == (width >= 80)
    assert ("accuracy 97.25%  1,024 images/s  comm 25%  0:01 left" in shown[-1]) == (width >= 80)


@pytest.mark.parametrize(("width", "length"), [(50, 0), (80, 10), (120, 30)])
def test_a_terminal_has_a_bar_of_the_steps_done_where_there_is_room(clock: Clock, width: int, length: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    display = ProgressDisplay(console, 1, 40)
    run(display, clock, range(1, 41))
    bars = re.findall(r"step (\d+)/40  \[(#*)(-*)\]  (\w+)", out.getvalue())
    assert bars[0][::3] == ("0", "starting") and len(bars) > 5 if length else not bars[1:]
    for done, full, rest, _ in bars[1:]:
        assert (len(full), len(full + rest)) == (length * int(done) // 40, length)


def test_figures_are_left_out_from_the_least_telling_on() -> None:
    figures = [Figure(0, "aaa"), Figure(2, "bbb"), Figure(1, "ccc")]
    assert [fitting(figures, room) for room in (13, 12, 8, 7, 3, 2)] == [
        "aaa  bbb  ccc", "aaa  ccc", "aaa  ccc", "aaa", "aaa", "",
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [*range(1, 60), 79, 80, 81, 82, 119, 120, 121, 122])
@pytest.mark.parametrize("pause_s", [0.0, 7.0])
def test_every_line_covers_the_same_time_of_training(clock: Clock, steps: int, pause_s: float) -> None:
    """Steps take 1/8 s, those of every second window of 5 s twice as long; the reference adds up the last 5 s."""
    out, communication = io.StringIO(), CommunicationClock()
    display = ProgressDisplay(Console(file=out, width=120), 4, steps, 0, communication)
    seconds, expected = [], []
    for step in range(1, steps + 1):
        seconds.append(0.25 if step // 40 % 2 else 0.125)
        clock.now_s += seconds[-1]
        communication.seconds += 0.03125
        before = len(out.getvalue())
        display.step_finished(record(step, seconds=seconds[-1]))
        if len(out.getvalue()) > before:
            warm = seconds[WARM_UP_STEPS:] if step > WARM_UP_STEPS else seconds
            count = next((n for n in range(1, len(warm)) if sum(warm[-n:]) >= WINDOW_S), len(warm))
            expected.append((128 * count / sum(warm[-count:]), 0.03125 * count / sum(warm[-count:])))
        if step == steps // 2:  # an evaluation, which is no part of a step
            clock.now_s += pause_s
            communication.seconds += pause_s
            display.evaluation_finished(step, Evaluation(0.5, 0.1, 10))
    display.close()
    shown = re.findall(r"([\d,]+) images/s  communication (\d+)%", out.getvalue())
    assert len(shown) == len(expected) >= 1
    for (speed, share), (true_speed, true_share) in zip(shown, expected, strict=True):
        assert float(speed.replace(",", "")) == pytest.approx(true_speed, rel=0.03)  # a window is exact to 1/64
        assert float(share) == pytest.approx(100 * true_share, abs=1)


@pytest.mark.parametrize("epochs", [1, 2, 9, 10, 11, 20, 21, 40, 50, 51, 100, 101, 1000, 12345])
def test_of_many_epochs_some_have_a_line_from_the_first_on_but_the_last(clock: Clock, epochs: int) -> None:
    out = io.StringIO()
    display = ProgressDisplay(Console(file=out, width=120), 1, epochs, epochs=epochs)
    for epoch in range(epochs):
        display.evaluation_finished(epoch, Evaluation(0.9, 0.1, 10))
        display.epoch_finished(epoch, 0.5)
    shown = [int(number) for number in re.findall(r"^epoch (\d+):", out.getvalue(), re.MULTILINE)]
    assert epochs not in shown and shown[:1] == [1][: epochs - 1] and len(shown) <= 11
    assert len(shown) == epochs - 1 if epochs <= 10 else len(shown) >= 3
    assert len({later - earlier for earlier, later in pairwise(shown[1:])}) <= 1


def test_what_goes_to_standard_error_stands_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = LiveLine(terminal, lambda: 20)
    line.paint("step 1")
    print("a warning", file=sys.stderr)
    line.paint("step 2 of so many that it is cut")
    line.close()
    assert sys.stderr is terminal
    written = "\rstep 1\x1b[K\r\x1b[Ka warning\n\rstep 2 of so many t\x1b[K\r\x1b[K"
    assert terminal.getvalue() == written


def test_in_the_background_nothing_is_painted_and_a_terminal_that_is_gone_ends_no_training() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    foreground, terminal = [False], io.StringIO()
    line = LiveLine(terminal, lambda: 80, lambda: foreground[0])
    line.paint("step 1")
    line.clear()
    assert terminal.getvalue() == ""
    foreground[0] = True
    line.paint("step 2")
    line.close()
    assert terminal.getvalue() == "\rstep 2\x1b[K\r\x1b[K"
    line = LiveLine(Gone(), lambda: 80)
    line.paint("step 3")
    line.close()
