"""`clcomm report`: a run's figures, for people and for programs, with clcomm/report/."""

from __future__ import annotations

import argparse
import sys

from clcomm.commands import output
from clcomm.commands.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file of --report, or those of a run's ranks")
    output.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Write the report; return 1 if a file was left out. Raises DataError if none could be read."""
    from clcomm.report import build, read_runs  # here, to keep it out of the start of other commands

    form = output.form_of(options)
    found = read_runs(options.files)
    for problem in found.problems:
        print(f"clcomm: left out {problem}", file=sys.stderr)
    output.write_report(build(found), form, options.output)
    return 1 if found.problems else 0


COMMAND = Command(
    "report",
    "show a run's figures: tables, charts, a page",
    "Show what a run's --report says: where the time went, which bucket, which rank. Files of several ranks of one run "
    "are put together, whatever their order. docs/reading-a-report.md reads one line by line.",
    add_arguments,
    run,
    (
        ("clcomm report run.json", "where the time went, on the terminal"),
        ("clcomm report run.json -o run.html", "the same as a page"),
    ),
)
