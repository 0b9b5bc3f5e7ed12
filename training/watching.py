"""Who follows a run on rank 0: the display and the loggers that the command line asks for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from training.communication_clock import CommunicationClock
from training.trainer import Callback

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def watched(
    options: Namespace, comm: Communicator, console: Console, total_steps: int, done_steps: int = 0
) -> Iterator[list[Callback]]:
    """Stand around a training; yields its callbacks, none but on rank 0, and closes them in the end. Collective.

    Raises ArgumentError on every rank when a logger's file can't be written.
    """
    with ExitStack() as stack:
        callbacks: list[Callback] = []
        problem = ""
        if comm.rank == 0:
            try:
                callbacks = _open(options, comm, console, total_steps, done_steps, stack)
            except OSError as error:
                problem = f"logs: expected a place that can be written, got {error.filename} ({error.strerror})"
        if options.log_csv or options.tensorboard:
            problem = comm.broadcast_object(problem, label="logs")
        if problem:
            raise ArgumentError(problem)
        yield callbacks


def _open(
    options: Namespace, comm: Communicator, console: Console, total_steps: int, done_steps: int, stack: ExitStack
) -> list[Callback]:
    callbacks: list[Callback] = []
    clock = CommunicationClock()
    comm.add_observer(clock)
    stack.callback(comm.remove_observer, clock)
    if options.log_csv:
        from training.loggers import CsvLogger

        callbacks.append(stack.enter_context(closing(CsvLogger(options.log_csv, comm.size, clock, done_steps > 0))))
    if options.tensorboard:
        from training.loggers import TensorBoardLogger

        callbacks.append(stack.enter_context(closing(TensorBoardLogger(options.tensorboard, comm.size, clock))))
    if not options.quiet:
        from training.progress import ProgressDisplay

        display = ProgressDisplay(console, comm.size, total_steps, done_steps, clock)
        callbacks.append(stack.enter_context(closing(display)))
    return callbacks
