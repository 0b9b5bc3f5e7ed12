"""`python -m benchmarks.networks.course`: GPT's loss on held-out text and ResNet's accuracy, beside PyTorch's.

One rank of each system trains the same network from the same weights on the same batches; the two run side by side.
After every part of the steps both are tested on the same samples. Nothing is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Report
from benchmarks.networks.workload import SIZES, write
from benchmarks.peers.batches import default_data
from benchmarks.peers.systems import OURS
from benchmarks.workers import Job
from clcomm.comm.watch import run

PROGRAM = "benchmarks.networks.course"
PYTORCH = "PyTorch"
#: How far apart the two may be: GPT's losses in percent, ResNet's accuracies in points.
APART = {"gpt": 1.0, "resnet": 0.5}


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report(f"course of {options.model} beside PyTorch", harness.command_line(PROGRAM))
    with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        splits = write(
            folder, options.model, options.size, 1, options.steps, options.batch, options.data, options.tests
        )
        given = ["--folder", name, "--batch", str(options.batch)]
        jobs = {
            system: stack.enter_context(Job(f"benchmarks.networks.{module}", *given, mpi=mpi))
            for system, module, mpi in ((OURS, "native", True), (PYTORCH, "ddp", False))
        }
        with console.status("training"):
            tests = course(jobs, options.steps, options.parts)
    title = f"{options.model}, {options.size}, batch {options.batch}, {splits.train.name}"
    grid = Grid(title, ("steps", *(f"{system}, {what}" for what in ("loss", "accuracy") for system in jobs), "apart"))
    for steps, found in tests:
        losses = [f"{found[system]['loss']:.5f}" for system in jobs]
        accuracies = [f"{found[system]['accuracy']:.2%}" for system in jobs]
        grid.add(str(steps), *losses, *accuracies, f"{apart(options.model, found):.3f}")
    report.grids.append(grid)
    unit, what = ("%", "held-out losses apart") if options.model == "gpt" else (" points", "accuracies apart")
    value = apart(options.model, tests[-1][1])
    bar = Bar(f"{title}: {what} after {options.steps} steps", value, APART[options.model], unit, at_least=False)
    report.bars.append(bar)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "The course of training beside PyTorch's.", windows=1, window_s=0)
    parser.add_argument("--model", choices=tuple(SIZES), default="gpt", help="default: %(default)s")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="default: %(default)s")
    parser.add_argument("--steps", type=harness.positive, default=1000, help="default: %(default)s")
    parser.add_argument("--parts", type=harness.positive, default=5, help="tests on the way; default: %(default)s")
    parser.add_argument("--batch", type=harness.positive, default=8, help="default: %(default)s")
    parser.add_argument("--tests", type=harness.positive, default=256, help="samples tested; default: %(default)s")
    parser.add_argument("--data", default=default_data(), help="ResNet's images; default here: %(default)s")
    return parser.parse_args()


def course(jobs: dict[str, Job], steps: int, parts: int) -> list[tuple[int, dict[str, dict[str, Any]]]]:
    """Train both side by side; return (steps so far, each system's test) for every part."""
    tests, done = [], 0

    def part(job: Job, count: int) -> dict[str, Any]:
        job.ask(course=True, steps=count)
        return job.ask(test=True)[0]

    with ThreadPoolExecutor(len(jobs)) as pool:
        for number in range(1, parts + 1):
            count = steps * number // parts - done
            done += count
            running = {name: pool.submit(part, job, count) for name, job in jobs.items()}
            tests.append((done, {name: each.result() for name, each in running.items()}))
    return tests


def apart(model: str, found: dict[str, dict[str, Any]]) -> float:
    """Return how far apart the two are: losses in percent of PyTorch's, accuracies in points."""
    ours, theirs = found[OURS], found[PYTORCH]
    if model == "gpt":
        return 100 * abs(ours["loss"] / theirs["loss"] - 1)
    return 100 * abs(ours["accuracy"] - theirs["accuracy"])


if __name__ == "__main__":
    run(main)
