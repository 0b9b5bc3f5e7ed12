"""The callbacks of a run on rank 0: its display and the loggers that its options ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from clcomm.communicator import Communicator
from clcomm.errors import ClcommError
from clcomm.storage.files import unwritable
from training.communication_clock import CommunicationClock
from training.evaluate import Evaluation
from training.metrics import StepRecord
from training.options import TrainingOptions
from training.trainer import Callback

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger("clcomm")


class OptionalLogger(Callback):
    """A logger that is dropped, with one warning, when its file cannot be written, for example on a full disk."""

    def __init__(self, option: str, path: str, logger: Any):
        self._name, self._logger = f"{option} {path}", logger

    def step_finished(self, record: StepRecord) -> None:
        self._call("step_finished", record)

    def evaluation_finished(self, step: int, evaluation: Evaluation) -> None:
        self._call("evaluation_finished", step, evaluation)

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        self._call("epoch_finished", epoch, train_loss)

    def close(self) -> None:
        """Close the logger unless it was dropped."""
        self._call("close")

    def _call(self, event: str, *args: Any) -> None:
        if self._logger is None:
            return
        try:
            getattr(self._logger, event)(*args)
        except OSError as error:
            _log.warning("%s: %s; the training goes on without it", self._name, error.strerror or error)
            with suppress(OSError):
                self._logger.close()
            self._logger = None


@contextmanager
def run_callbacks(
    options: TrainingOptions,
    comm: Communicator,
    console: Console,
    total_steps: int,
    done_steps: int = 0,
    epochs: int = 1,
) -> Iterator[list[Callback]]:
    """Yield the callbacks of a run, none on ranks other than 0, and close them at the end. Collective.

    A logger that fails during the run is dropped with a warning and does not end the training.

    Args:
        total_steps: the steps of the whole job.
        done_steps: those done before this run, if it resumes.
        epochs: the epochs of the whole job.

    Raises, on every rank, ArgumentError if a logger's file can't be opened, OutputError if the disk is full.
    """
    with ExitStack() as stack:
        callbacks: list[Callback] = []
        problem: ClcommError | None = None
        if comm.rank == 0:
            try:
                callbacks = _open(options, comm, console, total_steps, done_steps, epochs, stack)
            except OSError as error:
                problem = unwritable("logs", error.filename, error)
        if options.log_csv or options.tensorboard:
            problem = comm.broadcast_object(problem, label="logs")
        if problem:
            raise problem
        yield callbacks


def _open(
    options: TrainingOptions,
    comm: Communicator,
    console: Console,
    total_steps: int,
    done_steps: int,
    epochs: int,
    stack: ExitStack,
) -> list[Callback]:
    callbacks: list[Callback] = []
    if options.quiet and not (options.log_csv or options.tensorboard):
        return callbacks
    clock = CommunicationClock()
    comm.add_observer(clock)
    stack.callback(comm.remove_observer, clock)
    if options.log_csv:
        from training.loggers import CsvLogger

        table = CsvLogger(options.log_csv, comm.size, clock, done_steps > 0)
        callbacks.append(stack.enter_context(closing(OptionalLogger("--log-csv", options.log_csv, table))))
    if options.tensorboard:
        from training.loggers import TensorBoardLogger

        points = TensorBoardLogger(options.tensorboard, comm.size, clock)
        callbacks.append(stack.enter_context(closing(OptionalLogger("--tensorboard", options.tensorboard, points))))
    if not options.quiet:
        from training.progress_display import ProgressDisplay

        display = ProgressDisplay(console, comm.size, total_steps, done_steps, clock, epochs, options.SAMPLES)
        callbacks.append(stack.enter_context(closing(display)))
    return callbacks
