"""`python -m benchmarks.networks`: GPT's tokens/s and ResNet-18's images/s beside PyTorch DDP's, in turns.

Both train the same network from the same weights on the same batches, one thread a rank: GPT by AdamW, ResNet by SGD
with momentum. Before anything is timed, both have to reach the same loss in the same steps.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.networks.workload import SIZES, write
from benchmarks.peers.batches import COUNT, default_data
from benchmarks.peers.systems import OURS, System
from benchmarks.workers import Job
from clcomm.base.errors import MismatchError
from clcomm.comm.watch import run

PROGRAM = "benchmarks.networks"
DDP = "PyTorch DDP, gloo"
UNITS = {"gpt": "tokens", "resnet": "images"}
#: Our speed over DDP's.
TARGET = 1.2
_CHECK_STEPS, _LOSS_TOLERANCE = 2, 5e-3


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("networks beside PyTorch DDP", harness.command_line(PROGRAM))
    for model in options.model:
        for ranks in options.ranks:
            measure(report, console, options, model, ranks)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "GPT and ResNet-18 beside PyTorch DDP.", windows=5, window_s=3.0)
    parser.add_argument("--model", nargs="+", choices=tuple(SIZES), default=list(SIZES), help="default: both")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="default: %(default)s")
    parser.add_argument("--ranks", nargs="+", type=harness.positive, default=[4, 2], help="default: 4 2")
    parser.add_argument("--batch", type=harness.positive, default=8, help="of a rank; default: %(default)s")
    parser.add_argument("--data", default=default_data(), help="ResNet's images; default here: %(default)s")
    return parser.parse_args()


def measure(report: Report, console: Console, options: argparse.Namespace, model: str, ranks: int) -> None:
    """Measure one network on so many ranks, and add its table and bars."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as name, console.status(f"starting {model}") as status:
        folder = Path(name)
        splits = write(folder, model, options.size, ranks, COUNT, options.batch, options.data, options.batch)
        with started(folder, ranks, options) as systems:
            status.update(f"{model}: checking that both do the same")
            loss = check_same_work(systems)
            for system in systems:
                system.steps = harness.repeats_for(system.window(2)["seconds"] / 2, options.window_s, least=2)
            samples = harness.alternate(
                {system.name: system.images_per_s for system in systems},
                options.windows,
                warm_up=0,  # the steps so far
                show=lambda line: status.update(f"{model}, {ranks} ranks: {line}"),
            )
    each = splits.train.labels[0].size  # tokens of a sample, or an image
    title = f"{model}, {ranks} ranks, batch {options.batch} a rank, {splits.train.name}"
    grid = Grid(title, ("system", f"{UNITS[model]}/s", "min-max", "ms a step", "clcomm is (range)"))
    for system in systems:
        mine = samples[system.name]
        step_ms = 1e3 * ranks * options.batch / mine.median
        times = "" if system.name == OURS else str(Ratio.of(samples[OURS], mine))
        speeds = f"{mine.median * each:,.0f}", f"{mine.low * each:,.0f}-{mine.high * each:,.0f}"
        grid.add(system.name, *speeds, f"{step_ms:.1f}", times)
    report.grids.append(grid)
    report.notes.append(f"{title}: loss after the first steps {loss:.5f}")
    ratio = Ratio.of(samples[OURS], samples[DDP]).value
    report.bars.append(Bar(f"{model}, {ranks} ranks: {UNITS[model]}/s to DDP's", ratio, TARGET))


@contextmanager
def started(folder: Path, ranks: int, options: argparse.Namespace) -> Iterator[list[System]]:
    """Start the ranks of both systems, and end them afterwards."""
    with ExitStack() as stack:
        given = ["--folder", str(folder), "--batch", str(options.batch)]
        yield [
            System(name, stack.enter_context(Job(f"{PROGRAM}.{module}", *given, ranks=ranks, mpi=mpi)), options.batch)
            for name, module, mpi in ((OURS, "native", True), (DDP, "ddp", False))
        ]


def check_same_work(systems: list[System]) -> float:
    """Train each a few steps; return the loss, or raise MismatchError where they disagree."""
    losses = {system.name: system.window(_CHECK_STEPS)["loss"] for system in systems}
    for name, loss in losses.items():
        if not math.isclose(loss, losses[DDP], rel_tol=_LOSS_TOLERANCE):
            raise MismatchError(f"{name}: expected the loss {losses[DDP]:.6f} as {DDP} has, got {loss:.6f}")
    return losses[DDP]


if __name__ == "__main__":
    run(main)
