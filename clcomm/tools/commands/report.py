"""`clcomm report`: a run's figures, for people and for programs, with clcomm/insight/report/."""

from __future__ import annotations

import argparse
import sys

from clcomm.base.console.option_types import whole_number
from clcomm.base.errors import ArgumentError
from clcomm.tools.commands import output
from clcomm.tools.commands.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="a file of --report, or those of a run's ranks")
    output.add_arguments(parser)
    parser.add_argument(
        "--what-if", action="store_true", help="add what steps would take without a rank's delay, waits for data, ..."
    )
    parser.add_argument(
        "--serve", type=whole_number(0, 65535), nargs="?", const=0, metavar="PORT",
        help="instead of a file: the page of a running job, which updates itself; for this user on this host",
    )  # fmt: skip
    parser.add_argument("--job", type=whole_number(1), metavar="PID", help="which job, if several run: its process")


def run(options: argparse.Namespace) -> int:
    """Write the report; return 1 if a file was left out. Raises DataError if none could be read."""
    if options.serve is not None:
        return _serve(options)
    if not options.files or options.job:
        raise ArgumentError("report: expected FILE, or --serve [PORT] [--job PID] for the page of a running job")
    from clcomm.insight.report import build, read_runs  # here, to keep it out of the start of other commands

    form = output.form_of(options)
    found = read_runs(options.files)
    for problem in found.problems:
        print(f"clcomm: left out {problem}", file=sys.stderr)
    output.write_report(build(found, options.what_if), form, options.output)
    return 1 if found.problems else 0


def _serve(options: argparse.Namespace) -> int:
    """Serve a running job's page; raises NoJobError (exit code 1) where there is none."""
    if options.files or options.format or options.output or options.what_if:
        raise ArgumentError("--serve: shows a running job, as a page; leave out FILE, --format, -o and --what-if")
    from clcomm.insight.report.live import serve
    from clcomm.jobs.top.view import choose

    return serve(choose(options.job, "report --serve"), options.serve)


COMMAND = Command(
    "report",
    "show a run's figures: tables, charts, a page",
    "Show what a run's --report says: where the time went, which bucket, which rank. Files of several ranks of one run "
    "are put together, whatever their order. --serve shows a job that still runs. "
    "docs/reports.md reads one line by line.",
    add_arguments,
    run,
    (
        ("clcomm report run.json", "where the time went, on the terminal"),
        ("clcomm report run.json -o run.html", "the same as a page"),
        ("clcomm report run.json --what-if", "and what steps would take without what slows them"),
        ("clcomm report --serve", "the page of the job that runs here, until Ctrl-C"),
    ),
)
