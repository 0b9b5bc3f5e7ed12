"""`clcomm top`: a running job's ranks, from another terminal, with clcomm/jobs/top/."""

from __future__ import annotations

import argparse

from clcomm.base.console.option_types import number, whole_number
from clcomm.tools.commands.command import Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", type=whole_number(1), metavar="PID", help="which job, if several run: its process")
    parser.add_argument("--once", action="store_true", help="print the ranks once, in plain lines, and end")
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each look")
    parser.add_argument(
        "--interval", type=number(0.2, most=3600.0), default=1.0, metavar="S",
        help="seconds between looks; ranks write their figures once a second; default: %(default)s",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Show a job; raises NoJobError (exit code 1) where there is none."""
    from clcomm.jobs.top import view

    job = view.choose(options.job)
    if options.once:
        return view.show_once(job, options.json)
    return view.show_live(job, options.interval, options.json)


COMMAND = Command(
    "top",
    "watch a running job's ranks: step, speed, waits, memory",
    "Show what each rank of a running job does: its step and speed, the share of time in communication and waiting, "
    "for which rank, its cores and memory. Run it as the job's user on any of its hosts. Ctrl-C ends it, not the job.",
    add_arguments,
    run,
    (
        ("clcomm top", "watch the job that runs here, until Ctrl-C"),
        ("clcomm top --once --json", "one line of JSON, for scripts"),
        ("clcomm top --job 4711", "of several jobs that of process 4711"),
    ),
)
