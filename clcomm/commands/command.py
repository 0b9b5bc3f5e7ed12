"""What a sub-command is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
