"""`python -m benchmarks.balance`: two ranks, of which one shares its core, with equal shards and with --balance auto.

Each rank is pinned to a core of its own, and a process that only computes to the last rank's core, so that this rank
has about half of it. Two Trainers of equal models take turns in the same ranks, one with equal shards, one whose
Balancer divides the samples. A second table has both without the competing process: what balancing costs where there is
nothing to balance, and the limit: a division that loses nothing has all of the cores but that half. It starts itself on
--ranks ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.on_ranks import relaunch, slowest_s
from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.base.host import usable_cores
from clcomm.base.host.launcher import launched_rank
from clcomm.comm.watch import run
from clcomm.engine import Device
from clcomm.sync.balance import Balancer
from clcomm.sync.sampler import BalancedSampler, DistributedSampler
from training.data.datasets import load_synthetic
from training.data.loader import Loader
from training.engines.parts import build_parts
from training.trainer import Trainer

PROGRAM = "benchmarks.balance"
_SAMPLES, _LR, _FOREVER = 4096, 1e-3, 1 << 40
_COMPUTES = "while True: pass"
EQUAL, BALANCED = "equal shards", "--balance auto"


class Side:
    """A Trainer whose steps are taken a window at a time."""

    def __init__(self, comm: Communicator, options: argparse.Namespace, device: Device, is_balanced: bool):
        self.comm, self.samples = comm, options.batch * comm.size
        data = load_synthetic(_SAMPLES, 1, shape=(1, 28, 28)).train
        parts = build_parts("native", options.model, data.image_shape, data.classes, 0, device=device)
        self.balancer = Balancer(comm, options.batch) if is_balanced else None
        sampler = (
            DistributedSampler(len(data), comm.rank, comm.size)
            if self.balancer is None
            else BalancedSampler(len(data), comm.rank, comm.size, self.balancer.shares)
        )
        loader = Loader(data, sampler, options.batch, prefetch=0, held=1)
        trainer = Trainer(comm, Synchronizer(comm), parts, parts.make_optimizer("sgd", _LR), loader,
                          balancer=self.balancer)  # fmt: skip
        self._steps = trainer.train(_FOREVER)

    def rate(self, steps: int) -> float:
        """Return the samples of all ranks a second; collective."""
        return self.samples / self.seconds(steps)

    def seconds(self, steps: int) -> float:
        """Return the slowest rank's seconds of a step; collective."""
        return slowest_s(self.comm, lambda: next(self._steps), steps)


def main() -> int:
    options, console = parse(), harness.make_console()
    ended = relaunch(PROGRAM, options.ranks)
    if ended is not None:
        return ended
    core, allowed = own_core(options.ranks), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # before OpenCL is loaded
    report = Report(f"shares by speed, {options.model}, {options.ranks} ranks", harness.command_line(PROGRAM))
    with Communicator() as comm:
        device = Device.select("cpu", cores=1)
        is_slowed = comm.rank == comm.size - 1
        with competing(core if is_slowed else None):
            slowed = measure(report, comm, options, device, "the last rank shares its core")
        alone = measure(report, comm, options, device, "every rank has a core of its own")
        ratio = Ratio.of(slowed[BALANCED], slowed[EQUAL]).value
        report.bars.append(Bar("--balance auto to equal shards, a rank slowed", ratio, 1.25))
        report.notes.append(limit(comm.size, alone[EQUAL].median, slowed[EQUAL].median, slowed[BALANCED].median))
        if comm.rank == 0:
            os.sched_setaffinity(0, allowed)  # a report names the machine's cores
            harness.conclude(report, console, options.record)
    return 0


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Equal shards and shares by speed, with a slow rank.", windows=7, window_s=1.0)
    parser.add_argument("--ranks", type=harness.positive, default=2, help="default: %(default)s")
    parser.add_argument("--model", choices=("convnet", "mlp"), default="convnet", help="default: %(default)s")
    parser.add_argument("--batch", type=harness.positive, default=64, help="an equal share; default: %(default)s")
    parser.add_argument("--settle-s", type=float, default=6.0, help="before the first window; default: %(default)s")
    return parser.parse_args()


def own_core(ranks: int) -> int:
    """Return the core of this rank; raises ArgumentError where ranks outnumber cores."""
    cores = sorted(usable_cores())
    if ranks > len(cores):
        raise ArgumentError(f"--ranks: expected at most {len(cores)}, the cores of this machine, got {ranks}")
    return cores[launched_rank() or 0]


@contextmanager
def competing(core: int | None) -> Iterator[None]:
    """Let another process compute on a core within a block; None: let none."""
    if core is None:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\n{_COMPUTES}"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def limit(ranks: int, alone: float, equal: float, balanced: float) -> str:
    """Return in words what a division could gain, from the rates with a core for each rank and with a slow one."""
    share = 1 - 0.5 / ranks
    ideal = share * alone
    return (
        f"limit: the other process is due half a core, so that the ranks have {share:.1%} of theirs: {ideal:,.0f} "
        f"images/s, {ideal / equal:.2f}x equal shards; --balance auto has {balanced / ideal:.1%} of that, and the rest "
        "is lost in steps in which the core is away for a whole slice of the scheduler's time"
    )


def measure(
    report: Report, comm: Communicator, options: argparse.Namespace, device: Device, title: str
) -> dict[str, Samples]:
    """Add a table of both sides in turns, and return their rates; collective."""
    sides = {EQUAL: Side(comm, options, device, False), BALANCED: Side(comm, options, device, True)}
    for side in sides.values():
        side.seconds(harness.repeats_for(side.seconds(10), options.settle_s))
    steps = harness.repeats_for(sides[EQUAL].seconds(10), options.window_s)
    samples = harness.alternate({name: partial(side.rate, steps) for name, side in sides.items()}, options.windows)
    grid = Grid(title, ("", "images/s", "to equal", "shares", "changes"))
    for name, side in sides.items():
        shares = side.balancer.shares if side.balancer is not None else (options.batch,) * comm.size
        changes = side.balancer.changes if side.balancer is not None else 0
        ratio = Ratio.of(samples[name], samples[EQUAL])
        grid.add(name, f"{samples[name].median:,.0f}", str(ratio), " ".join(map(str, shares)), str(changes))
    report.grids.append(grid)
    return samples


if __name__ == "__main__":
    run(main)
