"""`python -m benchmarks.mixed`: ranks of two OpenCL runtimes, and of two libraries, in one job, beside each alone.

Each side of a pair, such as PoCL's and Intel's runtime, has a core of its own and --ranks ranks on it, alone and in the
mixed job: so the images a second of the two alone, added up, are what the same cores make without the other side. One
waits while the other is measured alone, and has the machine's memory and caches to itself. A batch is the same size
alone and mixed; each side's is chosen by its speed alone, so that a step of the mixed job takes all ranks equally long,
and each gradient weighs by its samples. Replicas have to be equal by hash.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from importlib.util import find_spec

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.mixed_rank import INTEL, POCL, TINYGRAD
from benchmarks.workers import Job
from clcomm.base.errors import ArgumentError
from clcomm.engine import intel_runtime

PROGRAM = "benchmarks.mixed"
PAIRS = (POCL, INTEL), (POCL, TINYGRAD)
_NAMES = {POCL: "engine on PoCL", INTEL: "engine on Intel's runtime", TINYGRAD: "tinygrad on PoCL"}
#: Which images/s of the mixed job to those of the two alone are asked for.
_BAR = 0.9
#: How often shares are found anew, as speed depends on the batch.
_ROUNDS = 3
#: Of Linux's load average: more than the measured ranks make.
_BUSY = 6
_WARM_UP_STEPS = 6  # kernels are built, steps recorded


class Side:
    """A job of ranks of some kinds, with a batch for each of them."""

    def __init__(self, kinds: list[str], cores: list[int], batch: int):
        arguments = ["--kinds", *kinds, "--cores", *map(str, cores)]
        self.job = Job("benchmarks.mixed_rank", *arguments, ranks=len(kinds))
        self.batches, self.steps = [batch] * len(kinds), 1

    def seconds(self, steps: int) -> float:
        """Return the slowest rank's seconds."""
        return max(each["seconds"] for each in self.job.ask(batches=self.batches, steps=steps))

    def settle(self, window_s: float) -> None:
        """Warm up, and find the number of steps of a window."""
        self.seconds(_WARM_UP_STEPS)
        self.steps = harness.repeats_that_fill(self.seconds, window_s)

    def rate(self) -> float:
        """Return the images a second of all ranks in a window."""
        return sum(self.batches) * self.steps / self.seconds(self.steps)

    def require_alike(self) -> None:
        """Raise ArgumentError where replicas differ by hash."""
        hashes = [each["hash"] for each in self.job.ask(hash=True)]
        if len(set(hashes)) > 1:
            raise ArgumentError(f"replicas: expected the same hash on every rank, got {hashes}")


def main() -> None:
    options, console = parse(), harness.make_console()
    missing = {INTEL: intel_runtime.library() is None, TINYGRAD: find_spec("tinygrad") is None}
    report = Report(f"mixed jobs, {options.ranks} ranks of each side", harness.command_line(PROGRAM))
    grid = Grid(
        "Images/s, a core for each side", ("", "first alone", "second alone", "mixed", "to both added up", "batches")
    )
    report.grids.append(grid)
    for pair in [each for each in PAIRS if each[1] in options.beside]:
        without = [kind for kind in pair if missing.get(kind)]
        if without:
            report.notes.append(f"{' with '.join(pair)}: left out, as {without[0]} is not installed: pip install "
                                f"'clcomm[{without[0]}]'")  # fmt: skip
            continue
        with console.status(" with ".join(pair)):
            measure(report, grid, pair, options)
    if os.getloadavg()[0] > _BUSY:
        report.notes.append(f"other programs computed on the machine at the same time, {os.getloadavg()[0]:.0f} by "
                            f"Linux's load average; the measured ranks had nice {os.nice(0)}")  # fmt: skip
    harness.conclude(report, console, options.record)


def measure(report: Report, grid: Grid, pair: tuple[str, str], options: argparse.Namespace) -> None:
    """Add a pair's row and bar."""
    each, name = options.ranks, f"{_NAMES[pair[0]]}, {_NAMES[pair[1]]}"
    with ExitStack() as stack:
        alone = [Side([kind] * each, [core] * each, options.batch) for core, kind in enumerate(pair)]
        mixed = Side([kind for kind in pair for _ in range(each)], [0] * each + [1] * each, options.batch)
        for side in (*alone, mixed):
            stack.callback(side.job.close)
        batches = [options.batch] * 2
        for _ in range(_ROUNDS):
            batches = shares(alone, options)
            for side, batch in zip(alone, batches, strict=True):
                side.batches = [batch] * each
        mixed.batches = [batch for batch in batches for _ in range(each)]
        for side in (*alone, mixed):
            side.settle(options.window_s)
        found = harness.alternate(
            {"first": alone[0].rate, "second": alone[1].rate, "mixed": mixed.rate}, options.windows
        )
        mixed.require_alike()
    both = Samples(tuple(map(sum, zip(found["first"].values, found["second"].values, strict=True))))
    ratio = Ratio.of(found["mixed"], both)
    grid.add(
        name, *(f"{samples.median:,.0f}" for samples in found.values()), str(ratio), " and ".join(map(str, batches))
    )
    report.bars.append(Bar(f"{name}: images/s to the two alone added up", ratio.value, _BAR))
    report.notes.append(f"{name}: replicas of all {2 * each} ranks equal by hash after the last window")


def shares(alone: list[Side], options: argparse.Namespace) -> list[int]:
    """Return each side's batch, in proportion to its speed with the batch that it has now; the mean is --batch."""
    for side in alone:
        side.settle(options.window_s / 2)
    rates = harness.alternate({str(number): side.rate for number, side in enumerate(alone)}, 3)
    speeds = [samples.median for samples in rates.values()]
    return [max(1, round(2 * options.batch * speed / sum(speeds))) for speed in speeds]


def parse() -> argparse.Namespace:
    parser = harness.parser(
        PROGRAM, "Two runtimes or libraries in one job, beside each alone.", windows=15, window_s=1.0
    )
    parser.add_argument("--ranks", type=harness.positive, default=2, help="of each side; default: %(default)s")
    parser.add_argument("--batch", type=harness.positive, default=128, help="the mean; default: %(default)s")
    beside = [second for _, second in PAIRS]
    parser.add_argument(
        "--beside", nargs="+", choices=beside, default=beside, help="what PoCL's ranks stand beside; default: all"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
