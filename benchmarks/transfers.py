"""`python -m benchmarks.transfers`: copies to and from a device's own memory, beside its kernels and in turn with them.

A step brings a batch to the device, computes on it, and brings as many results of the step before back to the host.
Steps whose copies are in the kernels' queue take turns with steps whose copies have queues of their own, and with the
kernels and the copies alone, which say how much there is to hide.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from clcomm.base.errors import ArgumentError
from clcomm.comm.watch import run
from clcomm.engine import Device, Tensor
from clcomm.engine.launch_queue import QueueMark
from clcomm.engine.ops.matmul import multiply
from clcomm.engine.tensor import empty

PROGRAM = "benchmarks.transfers"
APART, IN_TURN = "queues of their own", "in the kernels' queue"
KERNELS, COPIES = "kernels alone", "copies alone"
#: The least part of what could be hidden, the shorter of kernels and copies, in percent.
TARGET = 70.0


class Steps:
    """Steps on one device. side: of the square matrix that a step computes on; products: in a step."""

    def __init__(self, device: Device, side: int, products: int):
        self.device, self.products = device, products
        self.batch = np.random.default_rng(0).standard_normal((side, side)).astype(np.float32)
        self.got = np.empty_like(self.batch)
        self.x, self.weight, self.y = (Tensor(self.batch, device) for _ in range(3))
        self.own_queue = device.transfers.queue

    def compute(self) -> None:
        for _ in range(self.products):
            multiply(self.x, self.weight, self.y)

    def with_copies(self, computes: bool, apart: bool) -> None:
        device, before, mark = self.device, self.y, QueueMark(self.device)
        device.transfers.queue = self.own_queue if apart else device.queue
        self.x, self.y = Tensor(self.batch, device), empty(device, self.batch.shape)
        if computes:
            self.compute()
        if apart:
            mark.read(before.buffer, self.got, 0)
        else:
            device.read(before.buffer, self.got)

    def window(self, step: Callable[[], None], steps: int) -> float:
        """Return the seconds of a step."""
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        self.device.finish()
        return (time.perf_counter() - begin) / steps


def main() -> None:
    options, console = parse(), harness.make_console()
    device = Device.select(options.device)
    if options.as_gpu:
        device = Device(device.cl_device, kind="gpu")
    if device.shares_host_memory:
        raise ArgumentError(f"device: expected one with memory of its own, got {device!r}; do: --device gpu")
    report = Report(f"copies beside kernels on {device.name}", harness.command_line(PROGRAM))
    grid = Grid("ms a step", ("side", "products", KERNELS, COPIES, IN_TURN, APART, "to in turn", "hidden"))
    for products in options.products:
        measure(report, grid, Steps(device, options.side, products), options)
    report.grids.append(grid)
    harness.conclude(report, console, options.record)


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Copies beside kernels.", windows=7, window_s=0.3)
    parser.add_argument("--device", help="as CLCOMM_DEVICE names it; default: the first GPU")
    parser.add_argument("--as-gpu", action="store_true", help="treat it as one with memory of its own")
    parser.add_argument("--side", type=harness.positive, default=1024, help="of the matrices; default: %(default)s")
    parser.add_argument("--products", nargs="+", type=harness.positive, default=[1, 4, 16], help="default: 1 4 16")
    return parser.parse_args()


def measure(report: Report, grid: Grid, steps: Steps, options: argparse.Namespace) -> None:
    """Add a row, and its bar."""
    kinds: dict[str, Callable[[], None]] = {
        KERNELS: steps.compute,
        COPIES: partial(steps.with_copies, computes=False, apart=True),
        IN_TURN: partial(steps.with_copies, computes=True, apart=False),
        APART: partial(steps.with_copies, computes=True, apart=True),
    }
    steps.window(kinds[IN_TURN], 2)
    count = harness.repeats_for(steps.window(kinds[IN_TURN], 3), options.window_s)
    measures = {name: partial(steps.window, step, count) for name, step in kinds.items()}
    samples: dict[str, Samples] = harness.alternate(measures, options.windows)
    medians = {name: samples[name].median for name in kinds}
    hidden = (medians[IN_TURN] - medians[APART]) / min(medians[KERNELS], medians[COPIES])
    figures = (f"{medians[name] * 1e3:.3f}" for name in kinds)
    ratio = str(Ratio.of(samples[APART], samples[IN_TURN]))
    grid.add(str(options.side), str(steps.products), *figures, ratio, f"{hidden:.0%}")
    report.bars.append(Bar(f"{steps.products} products: hidden of what could be", 100 * hidden, TARGET, "%"))


if __name__ == "__main__":
    run(main)
