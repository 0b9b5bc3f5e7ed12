"""The command line of a training job: one argument for each of its options."""

from __future__ import annotations

from typing import Any, TypeVar

from clcomm.console.option_types import OneLineParser
from clcomm.transport.mpi_failures import place_in_world
from training.option_fields import Options, add_arguments

AnyOptions = TypeVar("AnyOptions", bound=Options)


class Parser(OneLineParser):
    """The parser of a training job, which prints its help on rank 0 alone."""

    def print_help(self, file: Any = None) -> None:
        if place_in_world()[0] == 0:
            super().print_help(file)


def parser(program: str, description: str, kind: type[Options]) -> Parser:
    """Return a parser of the options of `kind`."""
    result = Parser(prog=f"python -m {program}", description=description, allow_abbrev=False)
    add_arguments(result, kind)
    return result


def parse(program: str, description: str, kind: type[AnyOptions]) -> AnyOptions:
    """Return the options of `kind` on this process's command line; raises ArgumentError if they are not allowed."""
    return kind(**vars(parser(program, description, kind).parse_args()))
