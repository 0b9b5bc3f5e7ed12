"""Callbacks that write a run's figures while it runs: a CSV file, and points for exporters."""

from __future__ import annotations

import csv
import time
from contextlib import suppress
from typing import Any

from clcomm.base.storage.files import FilePath, open_locked, open_regular
from clcomm.insight.exporters.figures import EPOCH, EVALUATION, STEPS, EnergyMeter, Exporter, Point
from training.communication_clock import CommunicationClock, Lap
from training.evaluate import Evaluation
from training.metrics import StepRecord
from training.trainer import Callback

COLUMNS = (
    "step", "epoch", "loss", "lr", "step_ms", "data_wait_ms", "communication_ms", "images_per_s", "epoch_loss",
    "test_loss", "test_accuracy",
)  # fmt: skip
#: The most bytes that are read for the first line, which holds the columns' names.
_MOST_BYTES = 4096
#: The fewest steps of a point: writing one takes a considerable part of a short step.
POINT_EVERY = 10


class CsvLogger(Callback):
    """A row for each step, with rank 0's loss and times; an evaluation and an epoch's loss are in their last row.

    Args:
        path: the file.
        world_size: the number of ranks, for images/s of all of them.
        clock: an observer of rank 0's Communicator.
        goes_on: append to a file that has the same columns, as a resumed run does; False: replace it.

    Raises OSError if the file can't be written.
    """

    def __init__(self, path: FilePath, world_size: int, clock: CommunicationClock, goes_on: bool = False) -> None:
        self._world_size, self._lap = world_size, Lap(clock)
        goes_on = goes_on and _first_line(path) == ",".join(COLUMNS)
        self._file = open_locked(path, "a" if goes_on else "w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        if not goes_on:
            self._writer.writeheader()
        self._row: dict[str, Any] = {}  # the last step's, not yet written: an evaluation may follow

    def step_finished(self, record: StepRecord) -> None:
        self._write()
        self._row = {
            "step": record.step,
            "epoch": record.epoch + 1,
            "loss": record.loss,
            "lr": record.lr,
            "step_ms": f"{record.seconds * 1e3:.3f}",
            "data_wait_ms": f"{record.data_wait_s * 1e3:.3f}",
            "communication_ms": f"{self._lap.seconds() * 1e3:.3f}",
            "images_per_s": f"{record.samples_of_all(self._world_size) / record.seconds:.1f}",
        }

    def evaluation_finished(self, step: int, evaluation: Evaluation) -> None:
        self._lap.seconds()
        self._row |= {"step": step, "test_loss": evaluation.loss, "test_accuracy": evaluation.accuracy}

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        self._lap.seconds()
        self._row["epoch_loss"] = train_loss
        self._write()
        self._file.flush()

    def close(self) -> None:
        """Write the last row and close the file."""
        self._write()
        self._file.close()

    def _write(self) -> None:
        if self._row:
            self._writer.writerow(self._row)
            self._row = {}


def _first_line(path: FilePath) -> str:
    with suppress(OSError), open_regular(path) as file:
        return file.readline(_MOST_BYTES).decode(errors="replace").rstrip("\r\n")
    return ""


class PointLogger(Callback):
    """Hands an exporter points: of some steps, whose figures are their means; of evaluations; of epochs.

    Args:
        exporter: receives them, and is closed with this.
        world_size: the number of ranks, for images/s of all of them.
        energy: the meter of this rank's host; None: no figures of energy.
        ranks_here: the ranks whose energy it measures.
    """

    every_step = False

    def __init__(
        self, exporter: Exporter, world_size: int, energy: EnergyMeter | None = None, ranks_here: int = 1
    ) -> None:
        self._exporter, self._world_size, self._energy = exporter, world_size, energy
        self._share_here = ranks_here / world_size
        self._records: list[StepRecord] = []  # since the last point
        self._seconds = 0.0  # of these
        self._joules = 0.0  # up to the last point
        self._began_s = self._ended_s = self._epoch_s = time.time()

    def step_finished(self, record: StepRecord) -> None:
        self._ended_s = time.time()
        if not self._records:
            self._began_s = self._ended_s - record.seconds
        self._records.append(record)
        self._seconds += record.seconds
        if len(self._records) >= POINT_EVERY and self._seconds >= self._exporter.every_s:
            self._write()

    def evaluation_finished(self, step: int, evaluation: Evaluation) -> None:
        self._write()
        figures = {"test/accuracy": evaluation.accuracy, "test/loss": evaluation.loss}
        self._exporter.write(Point(EVALUATION, step, figures, self._ended_s, time.time()))
        if self._energy is not None:
            self._joules = self._energy.joules()  # an evaluation's are no step's

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        began_s, self._epoch_s = self._epoch_s, time.time()
        self._exporter.write(Point(EPOCH, epoch + 1, {"train/epoch_loss": train_loss}, began_s, self._epoch_s))

    def close(self) -> None:
        """Write the last point and close the exporter."""
        self._write()
        self._exporter.close()

    def _write(self) -> None:
        if not self._records:
            return
        records, self._records = self._records, []
        seconds, self._seconds = self._seconds, 0.0
        samples = sum(record.samples for record in records)
        of_all = sum(record.samples_of_all(self._world_size) for record in records)
        figures = {
            "train/loss": sum(record.loss * record.samples for record in records) / samples,
            "train/lr": records[-1].lr,
            "speed/images_per_s": of_all / seconds,
            "speed/step_ms": seconds / len(records) * 1e3,
            "speed/data_wait_share": sum(record.data_wait_s for record in records) / seconds,
            "speed/communication_share": sum(record.communication_s for record in records) / seconds,
        }
        if self._energy is not None:
            before, self._joules = self._joules, self._energy.joules()
            figures["energy/joules_per_step"] = (self._joules - before) / len(records)
            figures["energy/joules_per_sample"] = (self._joules - before) / (of_all * self._share_here)
        self._exporter.write(Point(STEPS, records[-1].step, figures, self._began_s, self._ended_s))
