"""Train a network on MNIST, data-parallel: `mpiexec -n 4 python -m examples.mnist`.

Without mpiexec it runs as a world of one. At the end it prints the result and the communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clcomm.job import run
from clcomm.report.record import write_document
from training.command_line import parse
from training.options import TrainingOptions
from training.result import Result, missed_target
from training.session import Session

if TYPE_CHECKING:
    from rich.console import Console

#: Exit code of a run that misses --target-accuracy.
TARGET_MISSED = 3


def main() -> int:
    return train(parse("examples.mnist", "Train a network on MNIST, data-parallel over MPI.", TrainingOptions))


def train(options: TrainingOptions) -> int:
    """Train as the options say, print and write the results, and return the program's exit code; collective."""
    session = Session(options)
    session.console.print(session.headline(), highlight=False)
    if options.summary:
        session.console.print(session.describe().table())
    result = session.run()
    comm, console = session.comm, session.console  # not those of the start if ranks were lost
    if comm.rank == 0:
        show(result, console, options.quiet)
    if options.report:
        write_document(options.report, result.as_report(options, comm, session.splits.name), comm)
    missed = missed_target(options, result.evaluation)
    if missed:
        console.print(missed, style="bold red", highlight=False)
    comm.rendezvous()
    return TARGET_MISSED if missed else 0


def show(result: Result, console: Console, quiet: bool) -> None:
    """Print the result, and the table of the communication unless `quiet`."""
    console.print(result.headline(), highlight=False)
    if not quiet:
        console.print(result.stats.table())


if __name__ == "__main__":
    run(main)
