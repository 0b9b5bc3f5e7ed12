"""`clcomm compare`: what changed between runs, and which of it is more than noise; clcomm/report/ works it out."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from clcomm.commands.command import Command

if TYPE_CHECKING:
    from rich.table import Table

    from clcomm.report.compared import Subject

#: Characters in a line where output goes to a file or a pipe.
_PLAIN_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="what --report wrote, a run's or a comparison's; the first is compared to",
    )


def run(options: argparse.Namespace) -> None:
    """Print a table for each pair of runs; raises DataError, naming the file, for one that can't be read."""
    from rich.console import Console  # here, because the other commands do without

    from clcomm.report.compared import pairs

    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    for number, (before, after) in enumerate(pairs(options.files)):
        if number:
            console.print()
        console.print(_table(before, after))


def _table(before: Subject, after: Subject) -> Table:
    from rich.table import Table

    from clcomm.report.compared import figures_changed, settings_changed

    table = Table(
        title=f"{after.name}, against {before.name}", title_justify="left", box=None, header_style="bold",
        pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for change in settings_changed(before, after):
        table.add_row(*change)
    for change in figures_changed(before, after):
        table.add_row(*change, style="bold" if change.verdict == "more than noise" else None)
    return table


COMMAND = Command(
    "compare",
    "compare runs' reports: settings, speed, communication, bytes, accuracy",
    "Compare reports of runs with the first one's, or a comparison's variants with its reference. Times differ by more "
    "than noise where their 95% intervals don't touch; of runs that took turns, where their ratio's leaves out 1.",
    add_arguments,
    run,
)
