"""`python -m benchmarks.checks`: the cost of comparing the calls of all ranks, and of noting the last rank.

Two Communicators of the same ranks take turns, one of them with CLCOMM_CHECKS=off.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Report, Samples
from benchmarks.workers import Job
from clcomm.comm.watch import run

PROGRAM = "benchmarks.checks"
OPERATIONS = ("barrier", "all_reduce, prepared", "all_reduce")
#: The most that the checks of an operation may cost, in microseconds: comparing 2, waits and stragglers 1.
TARGET_US = 3.0


def main() -> None:
    parser = harness.parser(PROGRAM, "Cost of comparing what ranks call.", windows=15, window_s=0.2)
    parser.add_argument(
        "--ranks", type=harness.positive, nargs="+", default=[2], help="default: 2, without a core each mostly noise"
    )
    parser.add_argument("--nbytes", type=harness.positive, default=256, help="of the arrays; default: %(default)s")
    options, console = parser.parse_args(), harness.make_console()
    report = Report("cost of checks", harness.command_line(PROGRAM))
    for ranks in options.ranks:
        grid = Grid(
            f"ranks: {ranks}, {options.nbytes} bytes; microseconds of an operation on a rank",
            ("operation", "time, on", "off", "processor, on", "off", "difference"),
        )
        arguments = str(options.nbytes)
        with Job("benchmarks.checks.worker", arguments, ranks=ranks) as job, console.status("") as status:
            for operation in OPERATIONS:
                figures = measure(job, operation, options.windows, options.window_s, status.update)
                cost_us = figures["cpu on"].median - figures["cpu off"].median
                cells = [figures[name].median for name in ("wall on", "wall off", "cpu on", "cpu off")]
                grid.add(operation, *(f"{value:.2f}" for value in (*cells, cost_us)))
                what = f"ranks: {ranks}, {operation}, processor time"
                report.bars.append(Bar(what, cost_us, TARGET_US, " us", at_least=False))
        report.grids.append(grid)
    harness.conclude(report, console, options.record)


def measure(
    job: Job, operation: str, windows: int, window_s: float, show: Callable[[str], object]
) -> dict[str, Samples]:
    """Return microseconds of a rank, by the clock and of processor time, with checks on and off."""
    trial = job.ask(checks="on", operation=operation, count=100)
    count = harness.repeats_for(trial[0]["wall"], window_s)
    walls: dict[str, list[float]] = {"on": [], "off": []}

    def window(checks: str) -> float:
        answers = job.ask(checks=checks, operation=operation, count=count)
        walls[checks].append(max(answer["wall"] for answer in answers) * 1e6)
        return statistics.mean(answer["cpu"] for answer in answers) * 1e6

    cpu = harness.alternate({checks: partial(window, checks) for checks in walls}, windows, show=show)
    wall = {f"wall {checks}": Samples(tuple(values[-windows:])) for checks, values in walls.items()}
    return wall | {f"cpu {checks}": samples for checks, samples in cpu.items()}


if __name__ == "__main__":
    run(main)
