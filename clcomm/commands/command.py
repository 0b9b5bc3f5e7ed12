"""What a sub-command is, and how sub-commands show tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A sub-command: its name, a line for the list of commands, its options, and what it does with them.

    `run` takes the parsed options and returns an exit code, None for success; it raises ClcommError for what the user
    can mend.
    """

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines whose columns begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
