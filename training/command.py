"""Commands of this repository alone, `python -m training.plan` and others: their parser, and their function."""

from __future__ import annotations

from collections.abc import Sequence

from clcomm.tools.cli import Parser
from clcomm.tools.commands.command import Command, ExamplesFormatter, epilog


def parser_of(command: Command) -> Parser:
    """Return the parser of a command's options."""
    found = Parser(
        prog=f"python -m training.{command.name}", description=command.description, epilog=epilog(command.examples),
        formatter_class=ExamplesFormatter,
    )  # fmt: skip
    command.add_arguments(found)
    return found


def run(command: Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command with these arguments, the process's own by default; return the exit code."""
    return command.run(parser_of(command).parse_args(arguments)) or 0
