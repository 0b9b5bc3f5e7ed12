"""The `clcomm` command, also `python -m clcomm`. A sub-command is a file in commands/ and its place in COMMANDS."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from clcomm import job
from clcomm._version import __version__
from clcomm.commands import bench, compare, devices, report, run, trace, tune, tune_kernels
from clcomm.transport.mpi import place_in_world

#: In the order in which the help shows them.
COMMANDS = (
    run.COMMAND, devices.COMMAND, tune_kernels.COMMAND, bench.COMMAND, tune.COMMAND, report.COMMAND,
    compare.COMMAND, trace.COMMAND,
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser that speaks once for all ranks."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if place_in_world()[0] == 0:
            super()._print_message(message, file)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; `options.run` is what the chosen sub-command does."""
    parser = Parser(prog="clcomm", description="Data-parallel training for OpenCL devices over MPI.")
    parser.add_argument("--version", action="version", version=f"clcomm {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.summary, description=command.description)
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, the process's own by default; return the exit code."""
    options = make_parser().parse_args(arguments)
    return options.run(options) or 0


def entry() -> NoReturn:
    """Run this process's command line and end it; errors are one line."""
    job.run(main)
