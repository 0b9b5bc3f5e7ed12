"""The progress of a run on rank 0: a repainted line on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import NamedTuple

from rich.console import Console

from clcomm.comm.stats.steps import WARM_UP_STEPS
from training.communication_clock import CommunicationClock, Lap
from training.evaluate import Evaluation
from training.live_line import live_line
from training.metrics import StepRecord
from training.trainer import Callback

#: Seconds between two lines where there is no terminal, and between two repaints on one.
LINE_EVERY_S, REDRAW_EVERY_S = 5.0, 0.2
#: Speed and communication are shown over this many last seconds of training.
WINDOW_S = 5.0
#: Weight of the newest value in the smoothed loss, and in the speed from which the time left is computed.
_LOSS_WEIGHT, _SPEED_WEIGHT = 0.1, 0.3
#: The most epochs that have a line each.
_MOST_EPOCH_LINES = 10
_MARKS = 64
#: Characters of the bar where there is room, and where there is less; else it is left out.
_BARS = 30, 10


class Figure(NamedTuple):
    """A part of the line; where not all fit, those with the largest `rank` are left out first."""

    rank: int
    text: str


class Totals(NamedTuple):
    """Seconds of steps, their samples, and their seconds of communication."""

    seconds: float = 0.0
    samples: float = 0.0
    communication_s: float = 0.0

    def plus(self, other: Totals) -> Totals:
        return Totals(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: Totals) -> Totals:
        return Totals(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Window:
    """Totals of the last `WINDOW_S` seconds of training, or of all of it while it is shorter.

    Pauses between steps, such as evaluations, don't count. The length is exact to 1/64.
    """

    def __init__(self) -> None:
        self._now = Totals()
        self._marks = deque([self._now])

    def add(self, step: Totals) -> None:
        """Add a step."""
        self._now = self._now.plus(step)
        if self._now.seconds - self._marks[-1].seconds >= WINDOW_S / _MARKS:
            self._marks.append(self._now)
        while len(self._marks) > 1 and self._now.seconds - self._marks[1].seconds >= WINDOW_S:
            self._marks.popleft()

    def begin_anew(self) -> None:
        """Drop all steps so far."""
        self._marks = deque([self._now])

    @property
    def totals(self) -> Totals:
        return self._now.minus(self._marks[0])


class ProgressDisplay(Callback):
    """A callback that shows step, loss, accuracy, speed, communication share and time left, until `close`.

    The loss is rank 0's, smoothed; the accuracy is the last evaluation's; the speed is that of all ranks.

    Args:
        console: rank 0's.
        world_size: the number of ranks, for the speed of all of them.
        total_steps: the steps of the whole job.
        done_steps: those done before this run, if it resumes.
        clock: an observer of rank 0's Communicator, for the communication share; None leaves that out.
        epochs: the epochs of the whole job; if they are many, only some have a line.
        samples: what a sample is, in the plural.
    """

    def __init__(
        self,
        console: Console,
        world_size: int,
        total_steps: int,
        done_steps: int = 0,
        clock: CommunicationClock | None = None,
        epochs: int = 1,
        samples: str = "images",
    ):
        self._console, self._world_size, self._samples = console, world_size, samples
        self._lap = None if clock is None else Lap(clock)
        self._total, self._done, self._epochs = total_steps, done_steps, epochs
        self._loss: float | None = None
        self._accuracy: float | None = None
        self._last_step, self._tested_at = done_steps, -1
        self._step_s: float | None = None  # smoothed; includes evaluations and pauses
        self._taken = 0
        self._paced_since, self._paced = time.perf_counter(), 0  # for the time left: since when, and steps since then
        self._window = Window()
        self._since = time.perf_counter()
        self._line = live_line(console)
        if self._line is not None:
            self._paint([Figure(0, "starting")])

    def step_finished(self, record: StepRecord) -> None:
        self._loss = record.loss if self._loss is None else self._loss + _LOSS_WEIGHT * (record.loss - self._loss)
        self._paced += 1
        self._taken += 1
        self._done += 1
        self._last_step = record.step
        if self._taken == WARM_UP_STEPS + 1:
            self._window.begin_anew()
            self._paced_since, self._paced = time.perf_counter() - record.seconds, 1
        communication_s = self._lap.seconds() if self._lap is not None else 0.0
        self._window.add(Totals(record.seconds, record.samples_of_all(self._world_size), communication_s))
        waited_s = time.perf_counter() - self._since
        if waited_s >= (REDRAW_EVERY_S if self._line else LINE_EVERY_S) or self._done == self._total:
            self._show()

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        self._leave_out_pause()
        number = epoch + 1
        if number == self._epochs or (number % epochs_a_line(self._epochs) and number != 1):
            return  # the last one's figures are in the result's line
        tested = "" if self._tested_at != self._last_step else f"; test accuracy {self._accuracy:.2%}"
        self._print(f"epoch {number}: mean training loss {train_loss:.4f}{tested}")

    def evaluation_finished(self, step: int, evaluation: Evaluation) -> None:
        self._leave_out_pause()
        self._accuracy, self._tested_at = evaluation.accuracy, step

    def _leave_out_pause(self) -> None:
        """Read the clock, so that the pause's communication counts in no step."""
        if self._lap is not None:
            self._lap.seconds()

    def close(self) -> None:
        """Restore the terminal."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _print(self, text: str) -> None:
        if self._line is not None:
            self._line.clear()
        self._console.print(text, highlight=False)

    def _show(self) -> None:
        self._paint(self._figures())
        self._since = time.perf_counter()

    def _paint(self, figures: list[Figure]) -> None:
        where = f"step {self._done}/{self._total}"
        if self._line is None:
            self._print("  ".join([where, *(figure.text for figure in figures)]))
            return
        text = fitting(figures, self._line.room - len(where) - 2)
        spare = self._line.room - len(where) - len(text) - 6
        length = next((each for each in _BARS if each <= min(spare, self._line.room // 3)), 0)
        if length:
            full = length * self._done // self._total
            where += f"  [{'#' * full}{'-' * (length - full)}]"
        self._line.paint(f"{where}  {text}")

    def _figures(self) -> list[Figure]:
        # The first figures come while kernels are still being built; the estimate leaves those steps out.
        if self._taken > WARM_UP_STEPS:
            now = time.perf_counter()
            step_s = (now - self._paced_since) / self._paced
            self._step_s = step_s if self._step_s is None else self._step_s + _SPEED_WEIGHT * (step_s - self._step_s)
            self._paced_since, self._paced = now, 0
        totals = self._window.totals
        seconds = max(totals.seconds, 1e-9)
        found = [Figure(0, f"loss {self._loss:.4f}")]
        if self._accuracy is not None:
            found.append(Figure(4, f"accuracy {self._accuracy:.2%}"))
        found.append(Figure(2, f"{totals.samples / seconds:,.0f} {self._samples}/s"))
        if self._lap is not None:
            name = "communication" if self._line is None else "comm"  # short, for narrow terminals
            found.append(Figure(1, f"{name} {totals.communication_s / seconds:.0%}"))
        if self._step_s is not None and self._done < self._total:
            found.append(Figure(3, f"{_duration((self._total - self._done) * self._step_s)} left"))
        return found


def epochs_a_line(epochs: int) -> int:
    """Return the number of epochs between two lines: 1, 2, 5, 10, 20, ..., so that there are few lines."""
    every, factors = 1, itertools.cycle((2, 2.5, 2))
    while epochs > every * _MOST_EPOCH_LINES:
        every = int(every * next(factors))
    return every


def fitting(figures: list[Figure], room: int) -> str:
    """Return the figures in their order, less those of the largest `rank` that exceed `room` characters."""
    kept = list(figures)
    while kept and len("  ".join(figure.text for figure in kept)) > room:
        kept.remove(max(kept))
    return "  ".join(figure.text for figure in kept)


def _duration(seconds: float) -> str:
    """Return a time as 0:05, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
