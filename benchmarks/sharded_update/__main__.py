"""`python -m benchmarks.sharded_update`: steps with the sharded update against steps with the plain one, on one host.

The plain update reads every rank's gradients once and writes their mean, then each rank updates all parameters and
state; the sharded one updates each of them once per host. The saving is limited by the bytes: each rank omits
(ranks - 1) / ranks of its update. Stages 2 and 3 of ZeRO, which also divide gradients and parameters, are beside it; on
one host they gather no parameters.
"""

from __future__ import annotations

import argparse
from functools import partial

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.workers import Job
from clcomm.comm.watch import run

PROGRAM = "benchmarks.sharded_update"
MODELS, OPTIMIZERS = ("mlp", "convnet", "gpt", "wide"), ("sgd", "adam")
#: What is measured, by the stage of ZeRO.
WAYS = {0: "plain", 1: "sharded", 2: "ZeRO 2", 3: "ZeRO 3"}
#: Arrays of the parameters' size that an update reads and writes: parameters twice, gradients, state twice each.
PASSES = {"sgd": 5, "adam": 7}
#: The least speed of a step with the sharded update, relative to the plain one's.
TARGET = 1.0


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("sharded update", harness.command_line(PROGRAM))
    columns = (
        "model, optimizer", "plain ms", "sharded ms", "speed", "ZeRO 2", "ZeRO 3", "plain processor ms", "sharded",
        "left out, MB",
    )  # fmt: skip
    grid = Grid(f"a step, {options.ranks} ranks, batch {options.batch} a rank", columns)
    with Job("benchmarks.sharded_update.worker", ranks=options.ranks) as job, console.status("starting") as status:
        for model in options.models:
            for optimizer in OPTIMIZERS:
                status.update(f"{model}, {optimizer}")
                add(report, grid, job, model, optimizer, options)
    report.grids.append(grid)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "The sharded update beside the plain one.", windows=21, window_s=0.5)
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--batch", type=harness.positive, default=16, help="of a rank; default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all")
    return parser.parse_args()


def add(report: Report, grid: Grid, job: Job, model: str, optimizer: str, options: argparse.Namespace) -> None:
    """Measure one model with one optimizer in alternating windows, and add its row and bar."""
    processor: dict[int, list[float]] = {stage: [] for stage in WAYS}
    nbytes = 0

    def speed(stage: int, steps: int) -> float:
        nonlocal nbytes
        asked = {"model": model, "optimizer": optimizer, "stage": stage, "batch": options.batch}
        answers = job.ask(**asked, steps=steps)
        nbytes = answers[0]["nbytes"]
        processor[stage].append(sum(answer["cpu"] for answer in answers) / steps)
        return steps / (max(a["stop"] for a in answers) - min(a["start"] for a in answers))

    for stage in WAYS:
        speed(stage, 1)
    steps = harness.repeats_for(1 / speed(0, 3), options.window_s)
    for taken in processor.values():
        taken.clear()
    samples = harness.alternate({name: partial(speed, stage, steps) for stage, name in WAYS.items()}, options.windows)
    ratio, *others = (Ratio.of(samples[WAYS[stage]], samples[WAYS[0]]) for stage in (1, 2, 3))
    times = [f"{1e3 / samples[WAYS[stage]].median:.2f}" for stage in (0, 1)]
    used = [Samples(tuple(processor[stage])).median for stage in (0, 1)]
    left_out = PASSES[optimizer] * nbytes * (options.ranks - 1)
    cells = [*times, str(ratio), *map(str, others), *(f"{1e3 * each:.2f}" for each in used), f"{left_out / 1e6:.1f}"]
    grid.add(f"{model}, {optimizer}", *cells)
    name = f"{model}, {optimizer}, {options.ranks} ranks"
    report.bars.append(Bar(f"{name}: steps a second against the plain update's", ratio.value, TARGET))
    gain = used[0] / used[1]
    report.bars.append(Bar(f"{name}: processor time of the plain update's step", gain, TARGET))


if __name__ == "__main__":
    run(main)
