"""`python -m benchmarks.cores`: images/s with one rank a core and with more ranks than cores, window by window."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.machine import cores
from benchmarks.peers.batches import default_data, write_batches
from benchmarks.peers.systems import System, calibrate
from benchmarks.workers import Job
from clcomm.comm.watch import run

PROGRAM = "benchmarks.cores"
#: The least speed with more ranks than cores, relative to one rank per core.
TARGET = 0.9


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("more ranks than cores", harness.command_line(PROGRAM))
    for model in options.model:
        measure(options, model, report)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "One rank a core, and more ranks than cores.", windows=5, window_s=1.0)
    parser.add_argument("--model", nargs="+", choices=("convnet", "mlp"), default=["convnet"])
    parser.add_argument("--batch", type=harness.positive, default=64, help="of a rank; default: %(default)s")
    parser.add_argument(
        "--ranks", nargs="+", type=harness.positive, default=[cores(), 2 * cores()], help="default: %(default)s"
    )
    parser.add_argument("--data", default=default_data(), help="as for the examples; default here: %(default)s")
    return parser.parse_args()


def measure(options: argparse.Namespace, model: str, report: Report) -> None:
    """Add one model's table and bars; the first number of ranks is the reference."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder, ExitStack() as stack:
        path = Path(folder, "batches.npz")
        shape = write_batches(path, options.data, max(options.ranks), options.batch, lambda line: None)
        arguments = ["--model", model, "--batches", str(path), "--shape", *map(str, shape)]
        systems = [
            System(
                str(ranks), stack.enter_context(Job("benchmarks.peers.engine", *arguments, ranks=ranks)), options.batch
            )
            for ranks in dict.fromkeys(options.ranks)
        ]
        calibrate(systems, options.window_s)
        samples = harness.alternate({system.name: system.images_per_s for system in systems}, options.windows)
    grid = Grid(f"{model}, batch {options.batch} a rank, {cores()} cores", ("ranks", "images/s", "min-max", "ratio"))
    first = samples[systems[0].name]
    for name, found in samples.items():
        ratio = Ratio.of(found, first)
        grid.add(name, f"{found.median:,.0f}", f"{found.low:,.0f}-{found.high:,.0f}", str(ratio))
        if found is not first:
            report.bars.append(Bar(f"{model}: {name} ranks against {systems[0].name}", ratio.value, TARGET))
    report.grids.append(grid)


if __name__ == "__main__":
    run(main)
