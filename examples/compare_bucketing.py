"""The same training run twice, gradients bucketed and per tensor: `mpiexec -n 2 python -m examples.compare_bucketing`.

LizarDist's three rows come first (all-reduces of gradients, as each rank counts them), then what they cost.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from clcomm.communicator import Communicator
from clcomm.job import run
from clcomm.synchronizer import GRADIENTS
from training import options as command_line
from training.console import make_console
from training.datasets import Splits
from training.logs import configure
from training.session import Result, Session, missed_target, open_session_data, write_report

TARGET_MISSED = 3


def main() -> int:
    options = parse()
    modes = {"bucketed": False, "per tensor": True}
    comm = Communicator(bucket_size=options.bucket_size, transport=options.transport)
    configure(comm.rank, comm.size, options.quiet)
    console = make_console(comm)
    splits = open_session_data(options, comm, console)
    runs = {
        name: train(Namespace(**{**vars(options), "no_bucketing": per_tensor}), comm, splits, console)
        for name, per_tensor in modes.items()
    }
    console.print(comparison([result for result, _ in runs.values()]))
    console.print(same_parameters([session for _, session in runs.values()]), highlight=False)
    for name, (result, _) in runs.items():
        console.print(result.stats.table(f"Communication, {name},", width=console.width))
    if options.report:
        reports = {
            name: result.as_report(session.options, comm, splits.name) for name, (result, session) in runs.items()
        }
        write_report(options.report, {"schema": 1, "runs": reports}, comm)
    missed = [line for result, _ in runs.values() if (line := missed_target(options, result.evaluation))]
    for line in missed:
        console.print(line, style="bold red", highlight=False)
    return TARGET_MISSED if missed else 0


def parse() -> Namespace:
    parser = command_line.parser(
        "examples.compare_bucketing", "Compare bucketed with per-tensor all-reduce on the same training run."
    )
    options = parser.parse_args()
    command_line.check(options)
    return options


def train(options: Namespace, comm: Communicator, splits: Splits, console: Console) -> tuple[Result, Session]:
    """Run one job from the start, with stats of its own."""
    comm.stats.reset()
    session = Session(options, comm, splits, console)
    console.print(session.headline(), highlight=False)
    result = session.run()
    console.print(result.summary(), highlight=False)
    return result, session


def comparison(results: list[Result]) -> Table:
    """Return the two runs side by side with the ratio of the first to the second."""
    table = Table(
        title="Gradient all-reduce, per rank", title_justify="left", box=None, header_style="bold", pad_edge=False
    )
    for heading, justify in (("", "left"), ("bucketed", "right"), ("per tensor", "right"), ("ratio", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    columns = [figures(result) for result in results]
    for name, (_, form) in columns[0].items():
        first, second = (column[name][0] for column in columns)
        ratio = f"{first / second:.3g}x" if second else "-"
        table.add_row(name, form.format(first), form.format(second), ratio)
    return table


def figures(result: Result) -> dict[str, tuple[float, str]]:
    """Return each row's value and how it is written."""
    total: dict[str, Any] = result.stats.total("all_reduce", GRADIENTS)
    return {
        "Average bytes/call": (total["average_bytes_per_call"], "{:,.0f}"),
        "Total all-reduce calls": (total["calls"], "{:,}"),
        "Total bytes sent": (total["bytes"], "{:,}"),
        "time per step, p50 (ms)": (result.step_p50_s * 1e3, "{:.3f}"),
        "time in all-reduce per step (ms)": (total["seconds"] / result.steps * 1e3, "{:.3f}"),
        "share of time in all-reduce (%)": (100 * total["seconds"] / result.seconds, "{:.2f}"),
        "algbw (GB/s)": (total["algbw_bytes_per_s"] / 1e9, "{:.3f}"),
        "images/s": (result.images_per_s, "{:,.0f}"),
    }


def same_parameters(sessions: list[Session]) -> str:
    """Return a line that says whether both runs ended with the same bits, as they should."""
    first, second = (session.parts.model.state_dict() for session in sessions)
    different = [name for name in first if not np.array_equal(first[name].view(np.uint8), second[name].view(np.uint8))]
    if different:
        return f"the two runs' parameters differ, first in {different[0]}"
    return "both runs ended with the same parameters, bit for bit"


if __name__ == "__main__":
    run(main)
