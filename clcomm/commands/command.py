"""The interface of a sub-command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """A sub-command: its name, its line in the list of commands, its description, its options and its function.

    `run` takes the parsed options and returns an exit code, None for success. It raises ClcommError for user errors.
    """

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
