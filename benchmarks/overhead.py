"""`python -m benchmarks.overhead`: a step's time outside kernels, its time by kernel, and by phase.

One rank on one core: steps timed as they are and steps whose kernels are timed by OpenCL's events take turns. A step,
its kernels together, and each of its launches count with their lower quartile over the steps, which a busy machine
changes little. The rest of a step is Python, launches and the upload of the batch.
Several ranks: the step's phases, with a wait after each, by the clock and in the rank's own processor time; where ranks
outnumber cores, sync by the clock is mostly the turns of other ranks. Alone: the same reductions in a row, so that no
rank waits for one that computes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.peers.batches import default_data, read_batches, write_batches
from benchmarks.peers.engine import PHASES, Native
from benchmarks.workers import Job
from clcomm import Communicator
from clcomm.comm.watch import run

PROGRAM = "benchmarks.overhead"
#: The largest share of a step at batch 64 that may not be kernels, in percent.
TARGETS = {"convnet": 5.0, "mlp": 15.0}
#: The largest share of synchronisation in a ConvNet step, in percent, and the least speed-up by bucketing.
SYNC_TARGET, BUCKETING_TARGET = 5.0, 3.0
BUCKETED, PER_TENSOR, SYNC, ALONE = "bucketed", "per tensor", "sync", "alone"
_WARM_UP_STEPS = 5
#: Seconds a step of each phase, by the clock and in processor time.
Phases = dict[str, list[float]]


def main() -> None:
    options, console = parse(), harness.make_console()
    report = Report("overhead and phases of a step", harness.command_line(PROGRAM))
    for model in options.model:
        with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
            path = Path(folder, "batches.npz")
            shape = write_batches(path, options.data, options.ranks, options.batch, lambda line: None)
            with console.status(f"{model}: kernels of one rank"):
                add_kernels(report, options, model, shape, path)
            with console.status(f"{model}: phases on {options.ranks} ranks"):
                add_phases(report, options, model, shape, path)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Overhead and phases of a training step.", windows=5, window_s=0.5)
    parser.add_argument("--model", nargs="+", choices=("convnet", "mlp"), default=["convnet", "mlp"])
    parser.add_argument("--batch", type=harness.positive, default=64, help="of a rank; default: %(default)s")
    parser.add_argument("--ranks", type=harness.positive, default=4, help="for the phases; default: %(default)s")
    parser.add_argument("--steps", type=harness.positive, default=100, help="of each kind; default: %(default)s")
    parser.add_argument("--data", default=default_data(), help="as for the examples; default here: %(default)s")
    harness.add_clock(parser)
    return parser.parse_args()


def profile(system: Native, steps: int, clock: Callable[[], float]) -> tuple[float, float, list[tuple[str, float]]]:
    """Return the seconds of a step, of its kernels, and (kernel, seconds) of each launch: lower quartiles."""
    device = system.device
    walls: list[float] = []
    launches: list[list[tuple[str, float]]] = []
    for number in range(-_WARM_UP_STEPS, steps):
        batch = number % len(system.batches)
        begin = clock()
        system.step(batch)
        device.finish()
        wall = clock() - begin
        with device.profile() as timed:
            system.step(batch)
        if number >= 0:
            walls.append(wall)
            launches.append([(launch.name, launch.seconds) for launch in timed.launches])
    labels = [label for label, _ in launches[0]]
    durations = [[seconds for _, seconds in step] for step in launches]
    kernels = _lower_quartile([sum(step) for step in durations])
    each = map(_lower_quartile, zip(*durations, strict=True))
    return _lower_quartile(walls), kernels, list(zip(labels, each, strict=True))


def _lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def add_kernels(report: Report, options: argparse.Namespace, model: str, shape: tuple[int, ...], path: Path) -> None:
    """Add the table of one rank's kernels, and the bar on what is not kernels."""
    comm = Communicator(transport="solo")
    comm.cores = 1
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    wall, kernels, launches = profile(Native(model, shape, read_batches(str(path), 0), comm), options.steps, clock)
    seconds: Counter[str] = Counter()
    for label, duration in launches:
        seconds[label] += duration  # type: ignore[assignment]
    calls = Counter(label for label, _ in launches)
    rest = wall - kernels
    title = f"{model}, 1 rank on 1 core, batch {options.batch}: {wall * 1e6:.0f} us a step, {len(launches)} launches"
    grid = Grid(title, ("kernel", "calls", "us a step", "share"))
    for label, duration in seconds.most_common():
        grid.add(label, str(calls[label]), f"{duration * 1e6:.1f}", f"{duration / wall:.1%}")
    grid.add("Python, launches, upload", "", f"{rest * 1e6:.1f}", f"{rest / wall:.1%}")
    report.grids.append(grid)
    if options.batch == 64:
        bar = Bar(f"{model}, batch 64: not kernels", 100 * rest / wall, TARGETS[model], "%", at_least=False)
        report.bars.append(bar)


def add_phases(report: Report, options: argparse.Namespace, model: str, shape: tuple[int, ...], path: Path) -> None:
    """Add the table of phases on all ranks, bucketed and with each tensor on its own, and the bars of sync."""
    arguments = ["--model", model, "--batches", str(path), "--shape", *map(str, shape)]
    with Job("benchmarks.peers.engine", *arguments, ranks=options.ranks) as job:
        settings = {BUCKETED: {"phases": True}, PER_TENSOR: {"phases": True, "per_tensor": True}}
        trial = job.ask(steps=10, settings=settings[BUCKETED])
        job.ask(steps=10, settings=settings[PER_TENSOR])  # prepares its reductions
        steps = harness.repeats_for(sum(trial[0]["phases"]["wall"].values()) / 10, options.window_s)
        windows = [
            {cut: job.ask(steps=steps, settings=settings[cut]) for cut in settings} for _ in range(options.windows)
        ]
        alone = alone_s(job, options)
    title = f"{model}, {options.ranks} ranks, batch {options.batch} a rank: phases, waiting after each"
    grid = Grid(title, ("phase", "ms a step", "share", "processor ms", "share"))
    bucketed, per_tensor = (phase_means([window[cut] for window in windows], steps) for cut in settings)
    walls, processor = (sum(column) for column in zip(*bucketed.values(), strict=True))
    for phase, (wall, cpu) in bucketed.items():
        grid.add(phase, f"{wall * 1e3:.3f}", f"{wall / walls:.1%}", f"{cpu * 1e3:.3f}", f"{cpu / processor:.1%}")
    wall, cpu = per_tensor[SYNC]
    grid.add(f"{SYNC}, {PER_TENSOR}", f"{wall * 1e3:.3f}", "", f"{cpu * 1e3:.3f}", "")
    for cut, samples in alone.items():
        grid.add(f"{SYNC} {ALONE}, {cut}", f"{samples.median * 1e3:.3f}", f"{samples.median / walls:.1%}", "", "")
    report.grids.append(grid)
    if model == "convnet" and options.batch == 64:
        add_bars(report, f"{model}, {options.ranks} ranks", bucketed, alone)


def alone_s(job: Job, options: argparse.Namespace) -> dict[str, Samples]:
    """Return the seconds of a step's reductions with nothing else between them, bucketed and per tensor, in turns."""

    def seconds(per_tensor: bool, steps: int) -> float:
        answers = job.ask(steps=steps, settings={"alone": True, "per_tensor": per_tensor})
        return (max(a["stop"] for a in answers) - min(a["start"] for a in answers)) / steps

    seconds(False, 20)
    steps = harness.repeats_for(seconds(True, 20), options.window_s / 4)
    ways = {BUCKETED: partial(seconds, False, steps), PER_TENSOR: partial(seconds, True, steps)}
    return harness.alternate(ways, 3 * options.windows)


def add_bars(report: Report, where: str, bucketed: Phases, alone: dict[str, Samples]) -> None:
    """Add the bars of the ConvNet's synchronisation."""
    share = bucketed[SYNC][1] / sum(cpu for _, cpu in bucketed.values())
    gain = Ratio.of(alone[PER_TENSOR], alone[BUCKETED]).value
    report.bars += [
        Bar(f"{where}: sync of a step, in processor time", 100 * share, SYNC_TARGET, "%", at_least=False),
        Bar(f"{where}: sync alone, per tensor against bucketed", gain, BUCKETING_TARGET),
    ]


def phase_means(windows: list[list[dict]], steps: int) -> Phases:
    """Return each phase's seconds a step, by the clock and in processor time: medians over windows and ranks."""
    answers = [answer["phases"] for window in windows for answer in window]
    return {
        phase: [statistics.median(answer[clock][phase] / steps for answer in answers) for clock in ("wall", "cpu")]
        for phase in PHASES
    }


if __name__ == "__main__":
    run(main)
