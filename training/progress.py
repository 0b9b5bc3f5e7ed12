"""What rank 0 shows while a run goes on: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from training.metrics import StepRecord

#: Seconds between two lines where there is no terminal, and between two redraws of the bar's figures.
LINE_EVERY_S, REDRAW_EVERY_S = 5.0, 0.2
#: Weight of the newest loss in the displayed, smoothed one.
_SMOOTHING = 0.1


class ProgressDisplay:
    """A callback that shows step, loss and speed; close it when the run is over."""

    def __init__(self, console: Console, world_size: int, total_steps: int, done_steps: int = 0):
        self._console, self._world_size, self._total = console, world_size, total_steps
        self._loss: float | None = None
        self._samples, self._since = 0, time.perf_counter()
        self._images_per_s = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = _bar(console)
            self._task = self._bar.add_task("training", total=total_steps, completed=done_steps, figures="")
            self._bar.start()

    def step_finished(self, record: StepRecord) -> None:
        self._loss = record.loss if self._loss is None else self._loss + _SMOOTHING * (record.loss - self._loss)
        self._samples += record.samples * self._world_size
        waited_s = time.perf_counter() - self._since
        if waited_s >= (REDRAW_EVERY_S if self._bar else LINE_EVERY_S) or record.step == self._total:
            self._images_per_s = self._samples / waited_s
            self._samples, self._since = 0, time.perf_counter()
            self._show(record)

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        self._console.print(f"epoch {epoch + 1}: mean training loss {train_loss:.4f}", highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, record: StepRecord) -> None:
        figures = f"loss {self._loss:.4f}  {self._images_per_s:,.0f} images/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, figures=figures)
        else:
            self._console.print(f"step {record.step}/{self._total}  {figures}", highlight=False)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
