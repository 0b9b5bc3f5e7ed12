"""`python -m benchmarks.kills`: a kill every 15 s where ranks come back: what a kill costs, and the bits at the end.

clcomm's ranks run under `clcomm run --min-ranks`, with logical shards. torchft's run as its README has them: a replica
group of one process each under a torchrun that restarts it, with its DistributedDataParallel on gloo. Both train the
same model on the same batches for as many steps, and are killed by SIGKILL, at the same drawn distances. Before, each
side trains undisturbed, for the hash to compare with.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import harness, results_file
from benchmarks.harness import Bar, Grid, Report
from benchmarks.kills import sides
from benchmarks.kills.outcome import Outcome, percentile
from benchmarks.kills.sides import Side
from benchmarks.kills.task import SHARDS, Task
from benchmarks.machine import describe_versions
from clcomm.base.errors import ArgumentError
from clcomm.comm.watch import run

PROGRAM = "benchmarks.kills"
OURS, TORCHFT = "clcomm", "torchft"
#: The most seconds from a kill to the next step, p95.
NEXT_STEP_S = 1.0
_COLUMNS = (
    "", "kills", "to the next step p50", "p95", "lost a kill p50", "p95", "samples lost", "of", "bits at the end",
)  # fmt: skip


def main() -> None:
    options, console = parse(), harness.make_console()
    chosen: dict[str, Side] = {OURS: sides.clcomm}
    if options.against == TORCHFT:
        if importlib.util.find_spec(TORCHFT) is None:
            raise ArgumentError("--against torchft: expected the package torchft-nightly, or torchft; pip install it")
        chosen[TORCHFT] = partial(sides.torchft, heartbeat_ms=options.heartbeat_ms)
    steps = max(1, round(options.minutes * 60 / options.step_s))
    report = Report("kills, and ranks that come back", harness.command_line(PROGRAM))
    title = f"{options.ranks} ranks, {steps} steps of {options.step_s:g} s, a kill every {options.every_s:g} s"
    grid = Grid(title, _COLUMNS)
    with console.status("starting") as status:
        for name, side in chosen.items():
            status.update(f"{name}, undisturbed")
            bits = sides.undisturbed(side, steps, options.ranks)
            status.update(f"{name}, killed")
            with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
                given = Task(Path(folder), steps, options.step_s)
                found = sides.killed(side, given, options.ranks, options.seed, options.every_s)
            add(report, grid, name, found, bits)
    report.grids.append(grid)
    if TORCHFT in chosen:
        versions = describe_versions(("torchft-nightly", "torchft"))
        report.notes.append(f"{versions}; a rank is given up {options.heartbeat_ms} ms after its last heartbeat")
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description="What a kill costs where ranks come back.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--minutes", type=harness.from_zero, default=30.0, help="of a run without kills; default: %(default)s")
    add("--every-s", type=harness.from_zero, default=15.0, help="between two kills, mean; default: %(default)s")
    add("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    add("--step-s", type=harness.from_zero, default=0.1, help="the least time of a step; default: %(default)s")
    add("--seed", type=harness.count, default=1, help="of the kills; default: %(default)s")
    add("--against", choices=(TORCHFT,), help="a system to measure beside")
    add("--heartbeat-ms", type=harness.positive, default=5000,
        help="after which torchft's lighthouse gives a rank up; default: its own, %(default)s")  # fmt: skip
    add("--record", action="store_true", help=f"keep the results in benchmarks/{results_file.RESULTS.name}")
    options = parser.parse_args()
    if SHARDS % options.ranks:
        parser.error(f"argument --ranks: expected a divisor of {SHARDS}, got {options.ranks}")
    if not options.minutes or not options.every_s or not options.step_s:
        parser.error("argument --minutes, --every-s, --step-s: expected numbers above 0")
    return options


def add(report: Report, grid: Grid, name: str, found: Outcome, bits: set[str]) -> None:
    """Add a side's row, and clcomm's bars."""
    measured = (found.next_step_s, found.lost_s)
    seconds = [f"{percentile(values, share):.2f} s" for values in measured for share in (50, 95)]
    alike = len(bits) == 1 and found.digests == bits
    end = "the undisturbed run's" if alike else f"others, {len(found.digests)} on its ranks"
    grid.add(name, str(len(found.lost_s)), *seconds, f"{found.lost_samples:,}", f"{found.samples:,}", end)
    if name == OURS:
        longest = percentile(found.next_step_s, 95)
        report.bars += [
            Bar("clcomm: p95 from a kill to the next step", longest, NEXT_STEP_S, " s", at_least=False),
            Bar("clcomm: samples lost", found.lost_samples, 0, "", at_least=False),
            Bar("clcomm: runs that end with the undisturbed run's bits", float(alike), 1, ""),
        ]


if __name__ == "__main__":
    run(main)
