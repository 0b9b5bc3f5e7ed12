"""The callbacks of a run: rank 0's display and log, and the exporters that its options ask for."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from clcomm.base.errors import ArgumentError, ClcommError
from clcomm.base.storage.files import unwritable
from clcomm.comm.communicator import Communicator
from clcomm.insight.exporters.figures import EnergyMeter, Exporter, Labels
from training.communication_clock import CommunicationClock
from training.evaluate import Evaluation
from training.loggers import CsvLogger, PointLogger
from training.metrics import StepRecord
from training.options import TrainingOptions
from training.trainer import Callback

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger("clcomm")


class OptionalLogger(Callback):
    """A logger that is dropped, with one warning, when it fails, for example on a full disk."""

    def __init__(self, option: str, path: str, logger: Any):
        self._name, self._logger = f"{option} {path}", logger
        self.every_step = logger.every_step

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
        except Exception as error:  # a tracker's package raises errors of its own
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            _log.warning("%s: %s; the training goes on without it", self._name, reason.splitlines()[0])
            with suppress(Exception):
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
    axis: str = "",
) -> Iterator[list[Callback]]:
    """Yield the callbacks of a run and close them at the end: rank 0's, and each rank's exporters. Collective.

    A logger that fails during the run is dropped with a warning and does not end the training.

    Args:
        total_steps: the steps of the whole job.
        done_steps: those done before this run, if it resumes.
        epochs: the epochs of the whole job.
        axis: this rank's place in the job's mesh, in words.

    Raises, on every rank, ArgumentError if a logger's file or port can't be opened, OutputError if the disk is full.
    """
    with ExitStack() as stack:
        callbacks: list[Callback] = []
        problem: ClcommError | None = None
        is_logged = options.log_csv or options.exports
        try:
            if options.exports:
                callbacks += _exporters(options, comm, console, axis, stack)
            if comm.rank == 0:
                callbacks += _open(options, comm, console, total_steps, done_steps, epochs, stack)
        except ArgumentError as error:
            problem = error
        except OSError as error:
            problem = unwritable("logs", error.filename, error)
        if is_logged:
            problem = next(filter(None, comm.all_gather_object(problem, label="logs")), None)
        if problem:
            raise problem
        yield callbacks


def _exporters(
    options: TrainingOptions, comm: Communicator, console: Console, axis: str, stack: ExitStack
) -> list[Callback]:
    """Return this rank's exporters; only the first rank of a host measures the host's energy."""
    energy = EnergyMeter() if comm.local_rank == 0 else None
    if energy is not None and energy.reason:
        if not options.quiet:
            console.print(energy.reason, highlight=False)
        energy = None
    labels = Labels(comm.rank, socket.gethostname(), axis)
    opened: list[Callback] = []

    def add(option: str, where: object, exporter: Exporter) -> None:
        logger = PointLogger(exporter, comm.size, energy, comm.local_size)
        opened.append(stack.enter_context(closing(OptionalLogger(option, str(where), logger))))

    if options.metrics_port or options.metrics_textfile:
        from clcomm.insight.exporters.prometheus import Prometheus

        address, _, first = (options.metrics_port or "").rpartition(":")
        port = int(first) + comm.local_rank if first else None
        name, where = ("--metrics-port", port) if port else ("--metrics-textfile", options.metrics_textfile)
        add(name, where, Prometheus(labels, port, options.metrics_textfile, address))
    if options.otlp:
        from clcomm.insight.exporters.otlp import Otlp

        add("--otlp", options.otlp, Otlp(labels, options.otlp))
    if comm.rank == 0 and options.tensorboard:
        from clcomm.insight.exporters.tensorboard import TensorBoard

        add("--tensorboard", options.tensorboard, TensorBoard(options.tensorboard))
    if comm.rank == 0 and options.wandb:
        from clcomm.insight.exporters.wandb import WeightsAndBiases

        add("--wandb", options.wandb, WeightsAndBiases(options.wandb, options.settings()))
    return opened


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
    if options.quiet and not options.log_csv:
        return callbacks
    clock = CommunicationClock()
    comm.add_observer(clock)
    stack.callback(comm.remove_observer, clock)
    if options.log_csv:
        table = CsvLogger(options.log_csv, comm.size, clock, done_steps > 0)
        callbacks.append(stack.enter_context(closing(OptionalLogger("--log-csv", options.log_csv, table))))
    if not options.quiet:
        from training.progress_display import ProgressDisplay

        display = ProgressDisplay(console, comm.size, total_steps, done_steps, clock, epochs, options.SAMPLES)
        callbacks.append(stack.enter_context(closing(display)))
    return callbacks
