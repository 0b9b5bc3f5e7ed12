"""`python -m benchmarks.lizardist_loop`: LizarDist's loop as it is and with its imports changed, in turns.

Model, data, batch, optimizer and number of threads are the same; only what averages the gradients differs. A third
loop averages nothing: no synchronisation can be faster than that.
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
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.peers.batches import default_data, write_batches
from benchmarks.peers.systems import System, calibrate
from benchmarks.workers import Job
from clcomm.base.errors import MismatchError
from clcomm.comm.watch import run

PROGRAM = "benchmarks.lizardist_loop"
#: The least speed over LizarDist's faster way, by model.
TARGETS = {"convnet": 1.0, "mlp": 1.1}
OURS, OURS_PER_TENSOR = "imports changed, bucketed", "imports changed, per tensor"
THEIRS, THEIRS_PER_TENSOR = "LizarDist, bucketed", "LizarDist, per tensor"
ALONE = "no averaging"
_CHECK_STEPS, _LOSS_TOLERANCE = 10, 1e-6


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("LizarDist's loop with its imports changed", harness.command_line(PROGRAM))
    for model in options.model:
        measure(options, model, report, console)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "LizarDist's loop with its imports changed.", windows=9, window_s=1.0)
    parser.add_argument("--model", nargs="+", choices=("convnet", "mlp"), default=["mlp", "convnet"])
    parser.add_argument("--batch", type=harness.positive, default=64, help="of a rank; default: %(default)s")
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--data", default=default_data(), help="as for the examples; default here: %(default)s")
    return parser.parse_args()


@contextmanager
def start(ranks: int, batch: int, arguments: list[str]) -> Iterator[list[System]]:
    """Start a job of each project, and end both afterwards."""
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(Job(f"benchmarks.peers.{module}", *arguments, ranks=ranks))
            for module in ("imports_changed", "lizardist")
        )
        yield [
            System(OURS, ours, batch, {"bucketing": True}),
            System(THEIRS, theirs, batch, {"bucketing": True}),
            System(OURS_PER_TENSOR, ours, batch, {"bucketing": False}),
            System(THEIRS_PER_TENSOR, theirs, batch, {"bucketing": False}),
            System(ALONE, ours, batch, {"synchronises": False}),
        ]


def measure(options: argparse.Namespace, model: str, report: Report, console: Console) -> None:
    """Measure one model and add its results to the report."""
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
        path = Path(folder, "batches.npz")
        shape = write_batches(path, options.data, options.ranks, options.batch, lambda line: None)
        arguments = ["--model", model, "--batches", str(path), "--shape", *map(str, shape)]
        with console.status(f"starting {model}") as status, start(options.ranks, options.batch, arguments) as systems:
            status.update("checking that all do the same")
            loss = check_same_losses(systems)
            calibrate(systems, options.window_s)
            samples = harness.alternate(
                {system.name: system.images_per_s for system in systems},
                options.windows,
                show=lambda line: status.update(f"{model}: {line}"),
            )
    title = f"{model}, {options.ranks} ranks, batch {options.batch} a rank, one thread a rank, {options.data}"
    report.grids.append(table(title, systems, samples))
    report.notes.append(f"{title}: loss after {_CHECK_STEPS} steps {loss:.6f}, the same to {_LOSS_TOLERANCE:g}")
    best = harness.best_of(samples, [THEIRS, THEIRS_PER_TENSOR])
    value = Ratio.of(samples[OURS], samples[best]).value
    report.bars.append(Bar(f"{model}, {OURS} as by default, against {best}", value, TARGETS[model]))


def check_same_losses(systems: list[System]) -> float:
    """Train each that averages a few steps, and return the loss; MismatchError where they disagree."""
    losses = {system.name: system.window(_CHECK_STEPS)["loss"] for system in systems if system.name != ALONE}
    first = losses[THEIRS]
    for name, loss in losses.items():
        if not math.isclose(loss, first, rel_tol=_LOSS_TOLERANCE):
            raise MismatchError(f"{name}: expected the loss {first:.8f} as {THEIRS} has, got {loss:.8f}")
    return first


def table(title: str, systems: list[System], samples: dict[str, Samples]) -> Grid:
    """Return all loops' speeds, and that of the changed imports over each."""
    grid = Grid(title, ("loop", "images/s", "min-max", "ms a step", f"{OURS} is (range)"))
    for system in systems:
        mine = samples[system.name]
        grid.add(
            system.name, f"{mine.median:,.0f}", f"{mine.low:,.0f}-{mine.high:,.0f}",
            f"{1e3 * system.ranks * system.batch / mine.median:.2f}",
            "" if system.name == OURS else str(Ratio.of(samples[OURS], mine)),
        )  # fmt: skip
    return grid


if __name__ == "__main__":
    run(main)
