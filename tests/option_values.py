"""Every option of every command, found in the argparse parsers, with values to give it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from clcomm.tools import cli
from examples.cifar import CifarOptions
from training import command_line, plan, replay
from training.command import parser_of
from training.comparison.options import ComparisonOptions
from training.options import TrainingOptions
from training.synthetic_options import SyntheticOptions
from training.text_options import TextOptions

#: What a user may type where a number is expected.
HOSTILE = (
    "0", "-1", "-0", "99999999", "999999999999", "9" * 23, "9" * 5000, "nan", "inf", "-inf", "1e400", "1e-400", "1.5",
    "0x10", "1_000", "²", "٣", "1²", "½", "∞", "", " ", " 1", "1\n2", "NaN%", "1,5", "--", "None", "true", "\x00",
)  # fmt: skip
#: Two different values of options that take any text.
_TEXTS = {
    "schedule": ("constant", "linear"),
    "bucket_size": ("1MiB", "2MiB"),
    "compression": ("fp16", "int8"),
    "policy": ("diloco:h=9", "local"),
    "image_shape": ("1x2x2", "3x2x2"),
    "zero": ("1", "2"),
    "link": ("1Gbit/s,2us", "2Gbit/s,2us"),
    "strategy": ("dp", "zero3"),
    "strategies": ("dp", "zero3"),
    "memory": ("1GiB", "2GiB"),
}


class Option(NamedTuple):
    """An option of a program: its name, argparse's action, and the words that it needs beside it."""

    program: str
    action: argparse.Action
    parser: argparse.ArgumentParser

    @property
    def flag(self) -> str:
        """The name that errors give it."""
        own = f"--{self.action.dest.replace('_', '-')}"
        names = self.action.option_strings
        return own if own in names else next((name for name in names if name.startswith("--")), own)

    def two_values(self) -> tuple[list[str], list[str]]:
        """Return two command lines that differ in this option alone."""
        action, name = self.action, self.action.option_strings[-1]
        if isinstance(action, argparse.BooleanOptionalAction):
            return [action.option_strings[0]], [action.option_strings[1]]
        if action.nargs == 0:
            return [], [name]
        if action.choices:
            first, second = list(action.choices)[:2]
            return [name, str(first)], [name, str(second)]
        first, second = _TEXTS.get(action.dest, ("3", "5"))
        return [name, first], [name, second]


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each program and of each sub-command of clcomm, by the name that it goes by."""
    found: dict[str, argparse.ArgumentParser] = {}
    kinds = {
        "examples.mnist": TrainingOptions,
        "examples.cifar": CifarOptions,
        "examples.gpt": TextOptions,
        "examples.synthetic_benchmark": SyntheticOptions,
        "examples.compare_bucketing": ComparisonOptions,
    }
    for program, kind in kinds.items():
        made = command_line.parser(program, "", kind)
        found[made.prog] = made
    for command in (plan.COMMAND, replay.COMMAND):
        found[f"training.{command.name}"] = parser_of(command)
    for listed in cli.COMMANDS:
        commands = cli.make_parser([listed.name])
        subparsers = next(a for a in commands._actions if isinstance(a, argparse._SubParsersAction))
        found[f"clcomm {listed.name}"] = subparsers.choices[listed.name]
    return found


def options() -> Iterator[Option]:
    """Yield every option of every program but those of help."""
    for program, parser in parsers().items():
        for action in parser._actions:
            if action.option_strings and action.dest != "help":
                yield Option(program, action, parser)
