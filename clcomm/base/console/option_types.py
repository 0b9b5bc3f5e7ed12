"""Types of options: numbers within bounds, in plain digits; the error for an invalid value is one line."""

from __future__ import annotations

import math
import re
from argparse import ArgumentError as ArgparseError
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from clcomm.base.errors import ArgumentError

#: A bound for counts, beyond what any program can work through.
MOST_COUNT = 10**12
_SHOWN = 40


class OneLineParser(ArgumentParser):
    """A parser that raises ArgumentError: one line for all ranks instead of a usage text from each."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse what is left over, and `--option=--`, an option without its value there.

        So a sub-command's own parser names what it does not know, and what it may have meant.
        """
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [each.partition("=")[0] for each in rest if each.startswith("--")]
            self.error(f"unrecognized arguments: {' '.join(rest)}{_meant(options, self._option_string_actions)}")
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if action.nargs is None and isinstance(value, list) and (value == [] or [] in value):
                self.error(f"argument {'/'.join(action.option_strings) or action.dest}: expected one argument")
        return found, rest

    def _check_value(self, action: Any, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except ArgparseError as error:
            meant = _meant([value], action.choices)
            error.message = f"invalid choice: {value!r}{meant}" if meant else error.message
            raise


def _meant(words: Iterable[object], known: Iterable[object]) -> str:
    """Return a question after the known words that are most like some others; "" where none is."""
    from difflib import get_close_matches  # here, as most command lines hold no mistake

    names = [*map(str, known)]
    near = [match for word in words for match in get_close_matches(str(word), names, 1)]
    return f" (did you mean {' and '.join(near)}?)" if near else ""


def whole_number(least: int = 0, most: int = MOST_COUNT) -> Callable[[object], int]:
    """Return a type for argparse, which converts a number or its text to a whole number from `least` to `most`."""

    def parse(given: object) -> int:
        text = str(given)
        value = int(text) if re.fullmatch(r"-?[0-9]{1,40}", text) else None
        if value is None or value < least:
            raise ArgumentTypeError(f"expected a whole number from {least} up, got {_cut(text)}")
        if value > most:
            raise ArgumentTypeError(f"expected a whole number up to {most}, got {_cut(text)}")
        return value

    return parse


def place(given: object) -> str:
    """Convert [ADDRESS:]PORT, for argparse, to ADDRESS:PORT; without an address it is this host's own, 127.0.0.1."""
    address, _, port = str(given).rpartition(":")
    return f"{address.strip('[]') or '127.0.0.1'}:{whole_number(1, 65535)(port)}"


def number(least: float = 0.0, *, above: bool = False, most: float = 1e300) -> Callable[[object], float]:
    """Return a type for argparse, which converts a number or its text to a finite number within bounds.

    Args:
        least: the lower bound.
        above: whether `least` itself is refused.
        most: the upper bound.
    """

    def parse(given: object) -> float:
        text = str(given)
        try:
            value = float(text) if text.isascii() else math.nan
        except ValueError:
            value = math.nan
        if not value >= least or (above and value == least) or value == math.inf:
            bound = f"above {least:g}" if above else f"from {least:g} up"
            raise ArgumentTypeError(f"expected a number {bound}, got {_cut(text)}")
        if value > most:
            raise ArgumentTypeError(f"expected a number up to {most:g}, got {_cut(text)}")
        return value

    return parse


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
