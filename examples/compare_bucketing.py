"""The same training with gradients bucketed, per tensor and in other ways: `python -m examples.compare_bucketing`.

All run in one go and take turns, so that noise meets them alike. LizarDist's three rows come first (all-reduces of
gradients, as each rank counts them), then what each way costs.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.job import run
from clcomm.report.record import write_document
from training import comparison_plot as charts
from training import comparison_tables as tables
from training import options as command_line
from training.comparison import Outcome, compare
from training.console import make_console
from training.logs import configure
from training.output_files import check_output_files
from training.result import missed_target
from training.session import open_session_data
from training.variants import DEFAULTS, GRAMMAR, variants_of

if TYPE_CHECKING:
    from rich.console import Console

TARGET_MISSED = 3


def main() -> int:
    options = parse()
    variants = variants_of(options)
    comm = Communicator(bucket_size=options.bucket_size, transport=options.transport)
    for variant in variants:
        check_output_files(variant.applied_to(options), comm)
    configure(comm.rank, comm.size, options.quiet)
    console = make_console(comm)
    splits = open_session_data(options, comm, console)
    outcomes = compare(variants, options, splits, console)
    if comm.rank == 0:
        show(outcomes, console, options.quiet)
    if options.report or options.plot:
        keep(outcomes, options, splits.name, comm)
    missed = [line for outcome in outcomes if (line := missed_target(options, outcome.result.evaluation))]
    for line in missed:
        console.print(line, style="bold red", highlight=False)
    return TARGET_MISSED if missed else 0


def show(outcomes: list[Outcome], console: Console, quiet: bool) -> None:
    """Print LizarDist's table, the times, and, unless `quiet`, the statistics of the two ways that it compares."""
    console.print(tables.calls_table(*outcomes[:2]))
    console.print(tables.times_table(outcomes))
    if communication_alone := tables.alone(outcomes):
        console.print(communication_alone, highlight=False)
    console.print(tables.same_parameters(outcomes), highlight=False)
    for outcome in [] if quiet else outcomes[:2]:
        console.print(outcome.result.stats.table(f"Communication, {outcome.variant.name},"))


def keep(outcomes: list[Outcome], options: Namespace, dataset: str, comm: Communicator) -> None:
    """Write the report and the chart as asked; collective."""
    costs = charts.measure_costs(outcomes)
    if options.report:
        write_document(options.report, tables.as_report(outcomes, costs, dataset), comm)
    if options.plot and comm.rank == 0:
        title = f"{options.model}, {comm.size} ranks, batch {options.batch_size} a rank"
        charts.draw(outcomes, costs, title, options.plot)


def parse() -> Namespace:
    parser = command_line.parser(
        "examples.compare_bucketing", "Compare bucketed with per-tensor all-reduce, and others, on the same training."
    )
    group: Any = parser.add_argument_group("comparison")
    group.add_argument(
        "--variants", nargs="*", metavar="WAY",
        help=f"to compare beside bucketed and per tensor: {GRAMMAR}; default: {' '.join(DEFAULTS)}",
    )  # fmt: skip
    group.add_argument("--plot", metavar="FILE.png", help="draw step time by bucket size (needs clcomm[plot])")
    command_line.add_trace_options(parser)
    options = command_line.parse(parser)
    if options.sharded_optimizer:
        raise ArgumentError("--sharded-optimizer: expected none where buckets are compared, as it reduces without any")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot: needs matplotlib, which is not installed; pip install 'clcomm[plot]'")
    return options


if __name__ == "__main__":
    run(main)
