"""The command line of a training job: one argument for each of its options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, TypeVar

from clcomm.base.console.option_types import OneLineParser
from clcomm.comm.transport.mpi_failures import place_in_world
from training.option_fields import Options, add_arguments

AnyOptions = TypeVar("AnyOptions", bound=Options)


class Parser(OneLineParser):
    """The parser of a training job, which prints its help on rank 0 alone: with --help the usual options.

    Args:
        usual: the names of these; () for all.
    """

    def __init__(self, usual: tuple[str, ...] = (), **settings: Any):
        super().__init__(**settings)
        self._usual = usual
        if usual:
            self.usage = "%(prog)s [option ...]"
            self.add_argument("--help-all", action=_HelpAll, dest="help", help="show all options and exit")

    def print_help(self, file: Any = None) -> None:
        if self._usual:
            others = [each for each in self._actions if each.dest not in ("help", *self._usual)]
            for action in others:  # the process ends after its help
                action.help = argparse.SUPPRESS
            self.epilog = f"--help-all shows {len(others)} other options."
        self.print_all_help(file)

    def print_all_help(self, file: Any = None) -> None:
        if place_in_world()[0] == 0:
            super().print_help(file)


class _HelpAll(argparse._HelpAction):
    def __call__(self, parser: Any, *given: Any) -> None:
        parser.print_all_help()
        parser.exit()


def parser(program: str, description: str, kind: type[Options]) -> Parser:
    """Return a parser of the options of `kind`."""
    result = Parser(kind.USUAL, prog=f"python -m {program}", description=description, allow_abbrev=False)
    add_arguments(result, kind)
    return result


def parse(
    program: str, description: str, kind: type[AnyOptions], presets: Mapping[str, Mapping[str, Any]] | None = None
) -> AnyOptions:
    """Return the options of `kind` on this process's command line; raises ArgumentError if they are not allowed.

    presets: defaults of options by the name that --preset takes; options on the command line come before them.
    """
    made = parser(program, description, kind)
    if presets is None:
        return kind(**vars(made.parse_args()))
    made.add_argument("--preset", choices=list(presets), help="a known run; other options change it")
    name = made.parse_args().preset
    if name is not None:
        made.set_defaults(**presets[name])
    found = vars(made.parse_args())
    del found["preset"]
    return kind(**found)
