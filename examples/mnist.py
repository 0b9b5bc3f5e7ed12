"""Train a network on MNIST, data-parallel: `mpiexec -n 4 python -m examples.mnist`.

Without mpiexec it is a world of one. At its end it prints what it reached and what was communicated.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from clcomm import elastic
from clcomm.communicator import Communicator
from clcomm.job import run
from clcomm.report.record import write_document
from training import options as command_line
from training.console import make_console
from training.logs import configure
from training.output_files import check_output_files
from training.result import Result, missed_target
from training.session import Session, open_session_data

if TYPE_CHECKING:
    from rich.console import Console

#: Exit code of a run that misses --target-accuracy.
TARGET_MISSED = 3


def main() -> int:
    options = parse()
    comm = Communicator(
        bucket_size=options.bucket_size, use_bucketing=not options.no_bucketing, transport=options.transport
    )
    check_output_files(options, comm)
    if options.elastic:
        elastic.require_support()
    configure(comm.rank, comm.size, options.quiet)
    console = make_console(comm)
    splits = open_session_data(options, comm, console)
    session = Session(options, comm, splits, console)
    console.print(session.headline(), highlight=False)
    if options.summary:
        summary = session.describe()
        if comm.rank == 0:
            console.print(summary.table())
    result = session.run()
    comm, console = session.comm, session.console  # others where ranks were lost
    if comm.rank == 0:
        show(result, console, options.quiet)
    if options.report:
        write_document(options.report, result.as_report(options, comm, splits.name), comm)
    missed = missed_target(options, result.evaluation)
    if missed:
        console.print(missed, style="bold red", highlight=False)
    comm.rendezvous()
    return TARGET_MISSED if missed else 0


def parse() -> Namespace:
    parser = command_line.parser("examples.mnist", "Train a network on MNIST, data-parallel over MPI.")
    command_line.add_checkpoint_options(parser)
    command_line.add_trace_options(parser)
    command_line.add_logging_options(parser)
    command_line.add_elastic_option(parser)
    options = command_line.parse(parser)
    return options


def show(result: Result, console: Console, quiet: bool) -> None:
    """Print what the run came to, and the table of what was communicated unless `quiet`."""
    console.print(result.headline(), highlight=False)
    if not quiet:
        console.print(result.stats.table())


if __name__ == "__main__":
    run(main)
