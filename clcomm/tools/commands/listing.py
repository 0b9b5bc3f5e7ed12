"""The list of sub-commands, each a file beside this one, and the parser of all of them.

A sub-command is imported at first use, so that the list itself loads no slow modules.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, NamedTuple

from clcomm._version import __version__
from clcomm.tools.commands.command import Command, ExamplesFormatter, epilog


class Listed(NamedTuple):
    name: str
    summary: str

    def load(self) -> Command:
        command: Command = import_module(f"clcomm.tools.commands.{self.name.replace('-', '_')}").COMMAND
        return command


#: In the order in which the help shows them.
COMMANDS: tuple[Listed | Command, ...] = (
    Listed("demo", "see in a minute how a training loses ranks, keeps its bits, and names a slow rank"),
    Listed("run", "start a script on some ranks, or a job again from its newest checkpoint when it fails"),
    Listed("verify", "find out whether a script trains on several ranks as one process would"),
    Listed("top", "watch a running job's ranks: step, speed, waits, memory"),
    Listed("doctor", "find out what is wrong with an installation, a host or a job's ranks"),
    Listed("devices", "list the OpenCL devices and which one a rank takes"),
    Listed("tune-kernels", "measure the kernels' sizes on a device and store the fastest"),
    Listed("bench", "time collectives by size, through one transport or several"),
    Listed("algorithms", "show what all-reduce algorithms send: messages, bytes, a drawing"),
    Listed("tune", "fit latency and bandwidth, recommend a bucket size, predict scaling"),
    Listed("report", "show a run's figures: tables, charts, a page"),
    Listed("forecast", "forecast a run's step on more ranks and another network"),
    Listed("compare", "compare runs' reports: settings, speed, communication, bytes, accuracy"),
    Listed("trace", "write the timeline of a job that was ended"),
    Listed("completion", "print the completion of this command's words for a shell"),
)
#: What is a program of the repository's package `training` now, as it knows that package's programs alone.
MOVED = ("plan", "replay")

#: Of the whole command: the first and the last lines of its help.
DESCRIPTION = "Data-parallel training for OpenCL devices over MPI."
EPILOG = "clcomm COMMAND --help shows a command's options and examples."


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser with the options of every sub-command, for completion."""
    parser = argparse.ArgumentParser(prog="clcomm", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"clcomm {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for listed in COMMANDS:
        add(commands, listed.load() if isinstance(listed, Listed) else listed)
    return parser


def add(commands: Any, command: Command) -> None:
    """Add a sub-command with its options, its examples and its function."""
    own = commands.add_parser(
        command.name, help=command.summary, description=command.description, epilog=epilog(command.examples),
        formatter_class=ExamplesFormatter,
    )  # fmt: skip
    command.add_arguments(own)
    own.set_defaults(run=command.run, command=command.name)
