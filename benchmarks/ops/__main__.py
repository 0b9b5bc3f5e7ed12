"""`python -m benchmarks.ops`: microseconds of each function's and layer's forward and backward, beside PyTorch's.

On one thread, by the same code under both libraries' names. "Replayed" is as the Trainer runs a step, "called" a call
of each function by Python.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.ops.cases import CASES, REPLAYED, SIZES
from benchmarks.workers import Job
from clcomm.comm.watch import run

PROGRAM = "benchmarks.ops"
CALLED, TORCH = "called", "PyTorch"
#: The least speed of a case beside PyTorch's.
TARGET = 0.8
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("functions and layers on one thread, forward and backward", harness.command_line(PROGRAM))
    ratios: dict[str, float] = {}
    with ExitStack() as stack, console.status("starting") as status:
        ours, theirs = (
            stack.enter_context(Job("benchmarks.ops.worker", library, mpi=False, environment=_ONE_THREAD))
            for library in ("clcomm", "torch")
        )
        jobs = {REPLAYED: ours, CALLED: ours, TORCH: theirs}
        for size in options.size:
            grid = Grid(size, ("case", f"{REPLAYED}, us", f"{CALLED}, us", f"{TORCH}, us", "to PyTorch", CALLED))
            for name in options.only:
                status.update(f"{name}, {size}")
                samples = harness.measured(jobs, options, name=name, size=size)
                medians = [f"{1e6 / samples[each].median:.1f}" for each in jobs]
                found = [Ratio.of(samples[each], samples[TORCH]) for each in (REPLAYED, CALLED)]
                grid.add(name, *medians, *map(str, found))
                ratios[f"{name}, {size}"] = found[0].value
            report.grids.append(grid)
    slowest = min(ratios, key=lambda name: ratios[name])
    reach = sum(value >= TARGET for value in ratios.values())
    report.bars.append(Bar(f"the slowest of {len(ratios)} ({slowest}; {reach} reach it)", ratios[slowest], TARGET))
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Functions and layers beside PyTorch's.", windows=7, window_s=0.02)
    parser.add_argument(
        "--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help="default: all"
    )
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=list(SIZES), metavar="SIZE",
        help=f"of {', '.join(SIZES)}; default: all")  # fmt: skip
    harness.add_clock(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
