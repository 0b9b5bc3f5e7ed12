"""Options as fields of a dataclass: the default, the check and the help of each are written once.

A program gives them by keyword and a user on the command line; the checks are the same.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from clcomm.base.errors import ArgumentError
from clcomm.sync import settings as declarations


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of a program's options: checks each value when an instance is created, and then all of them together.

    Raises ArgumentError, which names the option as on the command line.

    Attributes:
        USUAL: the options that --help shows, where it leaves the others to --help-all.
    """

    USUAL: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                accepted = _accepted(each.name, value, _option(each).accept)
                object.__setattr__(self, each.name, accepted)  # frozen from here on
        self.check()

    def check(self) -> None:
        """Raise ArgumentError where options contradict each other."""


@dataclass(frozen=True)
class Option:
    """What an option has beside its default.

    group: the heading under which the help lists it; "": it is no option of the command line.
    help: its description.
    accept: takes a value, or text of the command line, and returns the option's value; raises ArgumentTypeError for one
        that is not allowed.
    arguments: further keyword arguments of argparse.
    """

    group: str
    help: str
    accept: Callable[[Any], Any]
    arguments: dict[str, Any]


def option_group(title: str) -> Callable[..., Any]:
    """Return a function that declares a field as an option in one group of the help."""

    def option(
        default: Any,
        help: str = "",
        accept: Callable[[Any], Any] | None = None,
        *,
        choices: tuple[str, ...] = (),
        **arguments: Any,
    ) -> Any:
        if choices:
            accept, arguments["choices"] = one_of(choices), choices
        elif isinstance(default, bool):
            accept = switch
            arguments["action"] = BooleanOptionalAction if default else "store_true"
        elif accept not in (None, size) and "nargs" not in arguments:
            arguments["type"] = accept  # argparse names the option in its error
        return field(default=default, metadata={"option": Option(title, help, accept or text, arguments)})

    return option


def declared(name: str) -> tuple[Any, str]:
    """Return default and help of a Synchronizer's option."""
    option: declarations.Option[Any, Any] = vars(declarations.SyncSettings)[name]
    return option.default, option.help


def fixed(value: Any) -> Any:
    """Declare a field that is the same in every run, in place of an option that a program does not have."""
    return field(default=value, metadata={"option": Option("", "", lambda given: given, {})})


def add_arguments(parser: ArgumentParser, kind: type[Options]) -> None:
    """Add an argument for each option of `kind`, group by group."""
    groups: dict[str, Any] = {}
    for each in fields(kind):
        option = _option(each)
        if not option.group:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        described = [option.help] if option.help else []
        if each.default is not None and not isinstance(each.default, bool):
            described.append("default: %(default)s")
        groups[option.group].add_argument(
            flag(each.name), default=each.default, help="; ".join(described), **option.arguments
        )


def flag(name: str) -> str:
    """Return an option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def text(value: Any) -> str:
    """Accept text or a path."""
    if isinstance(value, (str, os.PathLike)):
        return str(value)
    raise ArgumentTypeError(f"expected text, got {value!r}")


def size(value: Any) -> int | str:
    """Accept a number of bytes or text such as "1MiB", for `parse_size` to read."""
    return value if isinstance(value, int) and not isinstance(value, bool) else text(value)


def switch(value: Any) -> bool:
    """Accept True or False."""
    if isinstance(value, bool):
        return value
    raise ArgumentTypeError(f"expected True or False, got {value!r}")


def one_of(choices: tuple[str, ...]) -> Callable[[Any], str]:
    """Return a function that accepts one of these texts."""

    def accept(value: Any) -> str:
        if value in choices:
            return value
        raise ArgumentTypeError(f"expected one of {', '.join(choices)}, got {value!r}")

    return accept


def _option(each: Any) -> Option:
    return each.metadata["option"]


def _accepted(name: str, value: Any, accept: Callable[[Any], Any]) -> Any:
    try:
        return accept(value)
    except ArgumentTypeError as error:
        raise ArgumentError(f"{flag(name)}: {error}") from None
