"""Callbacks that write a run's figures while it runs: a CSV file, and TensorBoard's event files. For rank 0."""

from __future__ import annotations

import csv
import os
import sys
import time
from contextlib import suppress
from typing import Any

from clcomm.storage.files import FilePath, open_locked, open_regular
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
#: Steps of a point for TensorBoard: writing one takes a considerable part of a short step.
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


class _EventFile:
    """An event file of scalars, written in the calling thread: errors in the thread of tensorboardX's writer get lost.

    tensorboardX is imported without PyTorch, whose 190 MiB scalars don't need.
    """

    def __init__(self, directory: str) -> None:
        hides_torch = "torch" not in sys.modules
        if hides_torch:
            sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.record_writer import RecordWriter
            from tensorboardX.summary import scalar
        finally:
            if hides_torch:
                del sys.modules["torch"]
        os.makedirs(directory, exist_ok=True)
        self._event, self._scalar = Event, scalar
        name = f"events.out.tfevents.{int(time.time())}.{os.uname().nodename}"
        self._writer = RecordWriter(os.path.join(directory, name))
        self.flush, self.close = self._writer.flush, self._writer.close
        self._write(file_version="brain.Event:2")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._write(step=step, summary=self._scalar(tag, value))

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class TensorBoardLogger(Callback):
    """Points for TensorBoard: of training and speed, each the mean of some steps; of epochs; of evaluations.

    Args:
        directory: that of the event files, a new one for each run.
        world_size: the number of ranks, for images/s of all of them.
        clock: an observer of rank 0's Communicator.

    Needs tensorboardX, the extra `tensorboard`. Raises OSError if the directory can't be written.
    """

    def __init__(self, directory: FilePath, world_size: int, clock: CommunicationClock) -> None:
        self._writer = _EventFile(os.fspath(directory))
        self._world_size, self._lap = world_size, Lap(clock)
        self._records: list[StepRecord] = []  # since the last point
        self._communication_s = 0.0

    def step_finished(self, record: StepRecord) -> None:
        self._records.append(record)
        self._communication_s += self._lap.seconds()
        if len(self._records) == POINT_EVERY:
            self._write()

    def evaluation_finished(self, step: int, evaluation: Evaluation) -> None:
        self._lap.seconds()
        self._writer.add_scalar("test/accuracy", evaluation.accuracy, step)
        self._writer.add_scalar("test/loss", evaluation.loss, step)

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        self._lap.seconds()
        self._writer.add_scalar("train/epoch_loss", train_loss, epoch + 1)
        self._writer.flush()

    def close(self) -> None:
        """Write the last point and close the file."""
        self._write()
        self._writer.close()

    def _write(self) -> None:
        if not self._records:
            return
        last, seconds = self._records[-1], sum(record.seconds for record in self._records)
        samples = sum(record.samples for record in self._records)
        of_all = sum(record.samples_of_all(self._world_size) for record in self._records)
        for tag, value in (
            ("train/loss", sum(record.loss * record.samples for record in self._records) / samples),
            ("train/lr", last.lr),
            ("speed/images_per_s", of_all / seconds),
            ("speed/step_ms", seconds / len(self._records) * 1e3),
            ("speed/communication_share", self._communication_s / seconds),
        ):
            self._writer.add_scalar(tag, value, last.step)
        self._records, self._communication_s = [], 0.0
