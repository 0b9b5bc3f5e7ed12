"""`clcomm forecast`: a run's step on more ranks and another network, with clcomm/comm/costs/jobs.py."""

from __future__ import annotations

import argparse
import sys

from clcomm.base.console.option_types import whole_number
from clcomm.base.errors import ArgumentError
from clcomm.tools.commands import output
from clcomm.tools.commands.command import Command

LEAST_RANKS, MOST_RANKS = 8, 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="a file of --report, or those of a run's ranks")
    add("--hosts", type=whole_number(1, MOST_RANKS), help="of the job to forecast")
    add("--link", metavar="RATE,LATENCY", help="of each host, such as 100Gbit/s,2us")
    add("--ranks-per-host", type=whole_number(1, MOST_RANKS), help="default: as many as the run had")
    add("--strategy", default="dp", help="dp, zero3, local:h=8 or diloco:h=50; default: %(default)s")
    add("--overlap", action=argparse.BooleanOptionalAction, default=None,
        help="reduce buckets during backward, or after it; default: as the run did")  # fmt: skip
    output.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Write the forecast; return 1 if a file was left out. Raises DataError for a run that does not tell enough."""
    if options.hosts is None or options.link is None:
        raise ArgumentError("forecast: expected --hosts N and --link RATE,LATENCY, such as 100Gbit/s,2us")
    from clcomm.comm.costs.jobs import Job, jobs_of
    from clcomm.insight.report import read_runs
    from clcomm.insight.report.forecasting import parse_link, parse_strategy, report_of
    from clcomm.insight.report.run_costs import Analysis

    form, link, strategy = output.form_of(options), parse_link(options.link), parse_strategy(options.strategy)
    found = read_runs(options.files)
    for problem in found.problems:
        print(f"clcomm: left out {problem}", file=sys.stderr)
    usual = -(-found.world_size // (found.figures["hosts"] or 1))
    asked = Job(options.hosts, options.ranks_per_host or usual)
    if asked.ranks > MOST_RANKS:
        raise ArgumentError(f"--hosts: expected up to {MOST_RANKS:,} ranks in all, got {asked.ranks:,}")
    jobs = jobs_of(asked.ranks_per_host, asked.hosts, LEAST_RANKS, MOST_RANKS)
    output.write_report(report_of(Analysis(found), link, jobs, asked, strategy, options.overlap), form, options.output)
    return 1 if found.problems else 0


COMMAND = Command(
    "forecast",
    "forecast a run's step on more ranks and another network",
    "Forecast a step of a run on more hosts: its time, exposed communication, bytes, memory and best bucket size, for "
    "8 to 4,096 ranks. What a rank computes is from the report, the network from --link. docs/forecast.md says how far "
    "each figure can be trusted.",
    add_arguments,
    run,
    (
        ("clcomm forecast run.json --hosts 256 --link 100Gbit/s,2us", "256 hosts like this one"),
        (
            "clcomm forecast run.json --hosts 64 --link 1Gbit/s,50us --strategy diloco:h=50",
            "with an exchange in 50 steps",
        ),
    ),
)
