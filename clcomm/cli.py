"""The `clcomm` command, also `python -m clcomm`. A sub-command is a file in commands/ and an entry of COMMANDS.

Only the sub-command in use is imported, so that `clcomm --version` and `--help` load no slow modules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from clcomm._version import __version__
from clcomm.commands.command import Command
from clcomm.launcher import launched_rank
from clcomm.option_types import OneLineParser


class Listed(NamedTuple):
    """A sub-command in the list of commands; `load` imports it."""

    name: str
    summary: str

    def load(self) -> Command:
        return import_module(f"clcomm.commands.{self.name.replace('-', '_')}").COMMAND


#: In the order in which the help shows them.
COMMANDS: tuple[Listed | Command, ...] = (
    Listed("run", "start a script on some ranks, or a job again from its newest checkpoint when it fails"),
    Listed("top", "watch a running job's ranks: step, speed, waits, memory"),
    Listed("doctor", "find out what is wrong with an installation, a host or a job's ranks"),
    Listed("devices", "list the OpenCL devices and which one a rank takes"),
    Listed("tune-kernels", "measure the kernels' sizes on a device and store the fastest"),
    Listed("bench", "time collectives by size, through one transport or several"),
    Listed("algorithms", "show what all-reduce algorithms send: messages, bytes, a drawing"),
    Listed("tune", "fit latency and bandwidth, recommend a bucket size, predict scaling"),
    Listed("report", "show a run's figures: tables, charts, a page"),
    Listed("compare", "compare runs' reports: settings, speed, communication, bytes, accuracy"),
    Listed("trace", "write the timeline of a job that was ended, from its parts"),
)


class Parser(OneLineParser):
    """A parser that prints once for all ranks."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if not launched_rank():
            super()._print_message(message, file)


def make_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a command line; `options.run` is the function of the line's sub-command."""
    parser = Parser(prog="clcomm", description="Data-parallel training for OpenCL devices over MPI.")
    parser.add_argument("--version", action="version", version=f"clcomm {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    asked_for = next((word for word in arguments if not word.startswith("-")), None)
    for listed in COMMANDS:
        if listed.name != asked_for:
            commands.add_parser(listed.name, help=listed.summary)
            continue
        command = listed.load() if isinstance(listed, Listed) else listed
        own = commands.add_parser(command.name, help=command.summary, description=command.description)
        command.add_arguments(own)
        own.set_defaults(run=command.run, command=command.name)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, the process's own by default; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    options = make_parser(given).parse_args(given)
    from clcomm.same_start import declared  # here, because help does not need it

    with declared(f"clcomm {options.command}", options):
        return options.run(options) or 0


def entry() -> NoReturn:
    """Run this process's command line and exit; errors are one line."""
    if {"--version", "--help", "-h"} & set(sys.argv[1:2]) or sys.argv[2:] in (["--help"], ["-h"]):
        sys.exit(main())  # these need no slow imports
    from clcomm.job import endings

    endings.run(main)
