"""Compare ways to synchronise gradients on the same training: `mpiexec -n 4 python -m examples.compare_bucketing`.

Gradients are reduced in buckets, tensor by tensor, and in other ways. All variants run in one job and take turns, so
that noise affects them alike. The output begins with LizarDist's three figures (all-reduces of gradients, as each rank
counts them), followed by the time of each variant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clcomm import run
from clcomm.comm.communicator import Communicator
from clcomm.insight.report.record import write_document
from training.command_line import parse
from training.comparison import plot as charts
from training.comparison import tables
from training.comparison.options import ComparisonOptions
from training.comparison.outcome import Outcome
from training.comparison.turns import compare
from training.comparison.variants import variants_of
from training.console import make_console
from training.logging_setup import configure_logging
from training.result import missed_target
from training.session import open_splits
from training.start import check_output_files, join_ranks

if TYPE_CHECKING:
    from rich.console import Console

#: Exit code of a comparison in which a run misses --target-accuracy.
TARGET_MISSED = 3


def main() -> int:
    options = parse(
        "examples.compare_bucketing", "Compare bucketed with per-tensor all-reduce, and others, on the same training.",
        ComparisonOptions,
    )  # fmt: skip
    variants = variants_of(options)
    comm = join_ranks(options)
    for variant in variants:
        check_output_files(variant.applied_to(options), comm, {"--plot": options.plot})
    configure_logging(comm.rank, comm.size, options.quiet)
    console = make_console(comm)
    splits = open_splits(options, comm, console)
    outcomes = compare(variants, options, splits, console)
    if comm.rank == 0:
        show(outcomes, console)
    if options.report or options.plot:
        keep(outcomes, options, splits.name, comm)
    missed = [line for outcome in outcomes if (line := missed_target(options, outcome.result.evaluation))]
    for line in missed:
        console.print(line, style="bold red", highlight=False)
    return TARGET_MISSED if missed else 0


def show(outcomes: list[Outcome], console: Console) -> None:
    """Print LizarDist's table of the first two variants, and the times."""
    console.print(tables.calls_table(*outcomes[:2]))
    console.print(tables.times_table(outcomes))
    if communication_alone := tables.alone(outcomes):
        console.print(communication_alone, highlight=False)
    console.print(tables.same_parameters(outcomes), highlight=False)


def keep(outcomes: list[Outcome], options: ComparisonOptions, dataset: str, comm: Communicator) -> None:
    """Write the report and the chart that the options request; collective."""
    costs = charts.measure_costs(outcomes)
    if options.report:
        write_document(options.report, tables.as_report(outcomes, costs, dataset), comm)
    if options.plot and comm.rank == 0:
        title = f"{options.model}, {comm.size} ranks, batch {options.batch_size} a rank"
        charts.draw(outcomes, costs, title, options.plot)


if __name__ == "__main__":
    run(main)
