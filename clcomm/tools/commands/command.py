"""The interface of a sub-command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """A sub-command: its name, its line in the list of commands, its description, its options and its function.

    `run` takes the parsed options and returns an exit code, None for success. It raises ClcommError for user errors.
    `examples` are (command line, explanation) pairs for the help and the manual.
    """

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    examples: tuple[tuple[str, str], ...] = ()


class ExamplesFormatter(argparse.HelpFormatter):
    """Fills descriptions, and keeps the lines of an epilog of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_HEADING) else super()._fill_text(text, width, indent)


_HEADING = "examples:"


def epilog(examples: tuple[tuple[str, str], ...]) -> str:
    """Return examples as the last part of a help; "" for none."""
    lines = [f"  {command}\n      {what}" for command, what in examples]
    return "\n".join([_HEADING, *lines]) if lines else ""
