"""`clcomm compare`: what changed between runs, and which of it is more than noise; clcomm/report/ works it out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from clcomm.commands.command import Command
from clcomm.text_table import Column, TextTable

if TYPE_CHECKING:
    from clcomm.report.compared import Subject


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="what --report wrote, a run's or a comparison's; the first is compared to",
    )


def run(options: argparse.Namespace) -> None:
    """Print a table for each pair of runs; raises DataError, naming the file, for one that can't be read."""
    from clcomm.console import make_console  # here, because the other commands do without Rich
    from clcomm.report.compared import pairs

    console = make_console(highlight=False)
    for number, (before, after) in enumerate(pairs(options.files)):
        if number:
            console.print()
        console.print(_table(before, after))


def _table(before: Subject, after: Subject) -> TextTable:
    from clcomm.report.compared import figures_changed, settings_changed

    settings, figures = settings_changed(before, after), figures_changed(before, after)
    styles = ["bold" if change.verdict == "more than noise" else "" for change in figures]
    return TextTable(
        [Column("", right=False), *map(Column, ("before", "after", "change")), Column("", right=False)],
        [*settings, *figures],
        title=f"{after.name}, against {before.name}",
        styles=[*[""] * len(settings), *styles],
    )


COMMAND = Command(
    "compare",
    "compare runs' reports: settings, speed, communication, bytes, accuracy",
    "Compare reports of runs with the first one's, or a comparison's variants with its reference. Times differ by more "
    "than noise where their 95% intervals don't touch; of runs that took turns, where their ratio's leaves out 1.",
    add_arguments,
    run,
)
