"""What rank 0 shows while a run goes on: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from training.communication_clock import CommunicationClock, Lap
from training.evaluate import Evaluation
from training.metrics import WARM_UP_STEPS, StepRecord
from training.trainer import Callback

#: Seconds between two lines where there is no terminal, and between two redraws of the bar.
LINE_EVERY_S, REDRAW_EVERY_S = 5.0, 0.2
#: Weight of the newest value in the displayed, smoothed loss, and in the speed that the time left comes from.
_LOSS_WEIGHT, _SPEED_WEIGHT = 0.1, 0.3
_BAR_WIDTH = 8


class Figure(NamedTuple):
    """A piece of the display; where not all fit, those with the largest `rank` are left out first."""

    rank: int
    text: str


class ProgressDisplay(Callback):
    """A callback that shows step, loss, accuracy, speed, communication's share and time left; close it at the end.

    The loss is rank 0's, smoothed; the accuracy that of the last evaluation; images/s are the whole world's. clock: an
    observer of rank 0's Communicator, for the share of time in communication; None leaves that out.
    """

    def __init__(
        self,
        console: Console,
        world_size: int,
        total_steps: int,
        done_steps: int = 0,
        clock: CommunicationClock | None = None,
    ):
        self._console, self._world_size = console, world_size
        self._lap = None if clock is None else Lap(clock)
        self._total, self._done = total_steps, done_steps
        self._loss: float | None = None
        self._accuracy: float | None = None
        self._last_step, self._tested_at = done_steps, -1
        self._step_s: float | None = None  # smoothed, evaluations and pauses included
        self._samples, self._steps, self._taken = 0, 0, 0
        self._since = time.perf_counter()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = _bar(console)
            self._task = self._bar.add_task("", total=total_steps, completed=done_steps, figures=[])
            self._bar.start()

    def step_finished(self, record: StepRecord) -> None:
        self._loss = record.loss if self._loss is None else self._loss + _LOSS_WEIGHT * (record.loss - self._loss)
        self._samples += record.samples * self._world_size
        self._steps += 1
        self._taken += 1
        self._done += 1
        self._last_step = record.step
        waited_s = time.perf_counter() - self._since
        if waited_s >= (REDRAW_EVERY_S if self._bar else LINE_EVERY_S) or self._done == self._total:
            self._show(waited_s)

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        tested = "" if self._tested_at != self._last_step else f"; test accuracy {self._accuracy:.2%}"
        self._console.print(f"epoch {epoch + 1}: mean training loss {train_loss:.4f}{tested}", highlight=False)

    def evaluation_finished(self, step: int, evaluation: Evaluation) -> None:
        self._accuracy, self._tested_at = evaluation.accuracy, step

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, waited_s: float) -> None:
        figures = self._figures(waited_s)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, figures=figures, refresh=True)
        else:
            texts = [figure.text for figure in figures]
            self._console.print("  ".join([f"step {self._done}/{self._total}", *texts]), highlight=False)
        self._samples, self._steps = 0, 0
        self._since = time.perf_counter()

    def _figures(self, waited_s: float) -> list[Figure]:
        """Return what there is to show of the last `waited_s` seconds."""
        if self._bar is None or self._taken > WARM_UP_STEPS:  # a bar comes soon, when kernels are still being built
            step_s = waited_s / self._steps
            self._step_s = step_s if self._step_s is None else self._step_s + _SPEED_WEIGHT * (step_s - self._step_s)
        found = [Figure(0, f"loss {self._loss:.4f}")]
        if self._accuracy is not None:
            found.append(Figure(4, f"accuracy {self._accuracy:.2%}"))
        found.append(Figure(2, f"{self._samples / waited_s:,.0f} images/s"))
        if self._lap is not None:
            name = "communication" if self._bar is None else "comm"  # short, so that a narrow terminal keeps it
            found.append(Figure(1, f"{name} {self._lap.seconds() / waited_s:.0%}"))
        if self._step_s is not None and self._done < self._total:
            found.append(Figure(3, f"{_duration((self._total - self._done) * self._step_s)} left"))
        return found


class _FiguresColumn(ProgressColumn):
    """As many figures as the terminal's width has room for, the most telling first."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def render(self, task: Task) -> Text:
        """Return the task's figures, joined."""
        room = self._console.width - _BAR_WIDTH - 2 * len(str(task.total)) - 3
        return Text(fitting(task.fields["figures"], room), no_wrap=True)


def fitting(figures: list[Figure], room: int) -> str:
    """Return the figures in their order, without those of the highest rank that `room` characters do not hold."""
    kept = list(figures)
    while kept and len("  ".join(figure.text for figure in kept)) > room:
        kept.remove(max(kept))
    return "  ".join(figure.text for figure in kept)


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(_BAR_WIDTH), TextColumn("{task.completed}/{task.total}"), _FiguresColumn(console), console=console,
        transient=True, auto_refresh=False, redirect_stderr=sys.stderr.isatty(),
    )  # fmt: skip


def _duration(seconds: float) -> str:
    """Return a time as people read it: 0:05, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
