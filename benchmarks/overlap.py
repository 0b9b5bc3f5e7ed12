"""`python -m benchmarks.overlap`: training steps with and without overlap, and the decision of `overlap="auto"`.

Two Synchronizers of equal models take turns on one batch; a step counts with the slowest rank's time over a window.
Exposed is the time of all-reduces during which the rank did nothing else, hidden the rest of it. It starts itself on
--ranks ranks; under mpiexec it runs on the job's ranks, so that `python tests/multihost/two_hosts.py 2 2 -m
benchmarks.overlap` measures two hosts.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Grid, Ratio, Report
from benchmarks.on_ranks import relaunch, slowest_s
from clcomm import Communicator, Synchronizer
from clcomm.comm.watch import run
from clcomm.sync.bucket_plan import GRADIENTS
from training.engines.parts import Placement, build_parts

PROGRAM = "benchmarks.overlap"
_IMAGE = (1, 28, 28)
_WARM_UP_STEPS = 5


class Side:
    """A model, its optimizer and its Synchronizer."""

    def __init__(self, comm: Communicator, options: argparse.Namespace, model: str, device: Any, overlap: bool | str):
        self.comm, self.overlap = comm, overlap
        self.parts = build_parts(options.engine, model, _IMAGE, 10, 0, device=device)
        self.sync = Synchronizer(comm, bucket_size=options.bucket_size, overlap=overlap)
        self.optimizer = self.parts.make_optimizer("sgd", 1e-4)
        self.sync.broadcast_parameters(self.parts.model)
        generator = np.random.default_rng(comm.rank)
        images = generator.standard_normal((options.batch, *_IMAGE)).astype(np.float32)
        self.batch = self.parts.prepare(images, generator.integers(0, 10, options.batch))
        for _ in range(_WARM_UP_STEPS):
            self.step()

    def step(self) -> None:
        """Train on the batch once."""
        loss = self.parts.forward_backward(*self.batch, 1.0)
        self.sync.sync_gradients(self.parts.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()

    def window(self, steps: int) -> float:
        """Return the seconds of a step on the slowest rank; collective."""
        return slowest_s(self.comm, self.step, steps)

    def communication(self, steps: int) -> tuple[float, float]:
        """Return the exposed and the hidden seconds of a step's all-reduces on an average rank; collective."""
        self.comm.stats.reset()
        for _ in range(steps):
            self.step()
        total = self.comm.merged_stats().total("all_reduce", GRADIENTS)
        return total["exposed_s"] / steps, total["hidden_s"] / steps


def main() -> int:
    options, console = parse(), harness.make_console()
    ended = relaunch(PROGRAM, options.ranks)
    if ended is not None:
        return ended
    report = Report("overlap", harness.command_line(PROGRAM))
    with Communicator(transport=options.transport) as comm:
        place = Placement(None, comm.local_rank, comm.local_size, comm.cores)
        device = place.opencl() if options.engine == "native" else place
        for model in options.model:
            measure(report, comm, options, model, device)
        hosts = f"{comm.hosts} host{'s' if comm.hosts > 1 else ''}"
        report.title += f", {options.engine}, {comm.size} ranks on {hosts}, {comm.cores} cores each"
        if comm.rank == 0:
            harness.conclude(report, console, options.record)
    return 0


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Training steps with and without overlap.", windows=7, window_s=0.5)
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--model", nargs="+", choices=("convnet", "mlp"), default=["convnet", "mlp"])
    parser.add_argument("--engine", choices=("native", "torch"), default="native", help="default: %(default)s")
    parser.add_argument("--batch", type=harness.positive, default=64, help="of a rank; default: %(default)s")
    parser.add_argument("--bucket-size", default="128KiB", metavar="SIZE", help="default: %(default)s")
    parser.add_argument("--transport", choices=("auto", "shared", "mpi"), default="auto", help="default: %(default)s")
    return parser.parse_args()


def measure(report: Report, comm: Communicator, options: argparse.Namespace, model: str, device: Any) -> None:
    """Add a model's table: both ways in turns, then the decision of auto; collective."""
    sides = {"off": Side(comm, options, model, device, False), "on": Side(comm, options, model, device, True)}
    steps = harness.repeats_for(sides["off"].window(3), options.window_s)
    samples = harness.alternate({name: partial(side.window, steps) for name, side in sides.items()}, options.windows)
    buckets = len(sides["off"].sync.bucket_plan(sides["off"].parts.model))
    title = f"{model}, batch {options.batch}, {buckets} buckets"
    grid = Grid(title, ("overlap", "ms a step", "to off", "exposed ms", "hidden ms"))
    for name, side in sides.items():
        exposed_s, hidden_s = side.communication(steps)
        ratio = Ratio.of(samples[name], samples["off"])
        milliseconds = (f"{seconds * 1e3:.3f}" for seconds in (exposed_s, hidden_s))
        grid.add(name, f"{samples[name].median * 1e3:.3f}", str(ratio), *milliseconds)
    report.grids.append(grid)
    auto = Side(comm, options, model, device, "auto")
    while not auto.sync.decisions():
        auto.step()
    report.notes += [f"{model}: {decision}" for decision in auto.sync.decisions()]


if __name__ == "__main__":
    run(main)
