"""`python -m benchmarks.pipeline`: the bubble of each schedule beside its formula, and the activations that it keeps.

Waits: a stage of equal work is a wait of known length, twice as long backward as forward, that stands for a device of
the rank's own. Ranks may then outnumber the cores: a rank that waits needs none. What is measured beside the waits is
this package's: messages, wake-ups, Python. Kernels: stages of equal layers that compute on the CPU, for as many ranks
as there are cores, beside one rank that runs all stages on the same micro-batches. Bytes: what a GPT's ranks keep.

It starts itself on --ranks ranks. Schedules take turns; a figure is the median over --windows windows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report, Samples
from benchmarks.on_ranks import relaunch, slowest_s
from clcomm import Communicator
from clcomm.base.host import usable_cores
from clcomm.base.schedules.pipeline import GPIPE, INTERLEAVED, ONE_F_ONE_B, SCHEDULES
from clcomm.base.units import format_size
from clcomm.comm.watch import run
from clcomm.engine import Device, Linear, Module, Op, ReLU, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.parallel.pipeline import Pipeline
from models.gpt import GPT, next_token_loss

PROGRAM = "benchmarks.pipeline"
_WIDTH = 64  # of the layers that wait
_CONTEXT, _VOCABULARY = 64, 96
#: The most that 1F1B's measured bubble may be above its formula.
TARGET = 1.15


class _Wait(Op):
    """Waits in place of computing: `seconds` forward, twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return (grad,)


class WaitingLayer(Module):
    """A small layer, and a wait that stands for a large one's time."""

    def __init__(self, seconds: float, device: Device):
        self.seconds, self.layer = seconds, Linear(_WIDTH, _WIDTH, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(self.layer(x), seconds=self.seconds)


def main() -> int:
    options, console = parse(), harness.make_console()
    ended = relaunch(PROGRAM, options.ranks)
    if ended is not None:
        return ended
    report = Report("pipeline: bubbles and activations", harness.command_line(PROGRAM))
    with Communicator() as comm:
        device = Device.select(local_rank=comm.local_rank, local_size=comm.local_size, cores=comm.cores)
        waits(report, comm, options, device)
        activations(report, comm, options, device)
        kernels(report, comm, options, device)
        report.title += f", {comm.size} ranks, {comm.cores} core{'s' if comm.cores > 1 else ''} each"
        if comm.rank == 0:
            harness.conclude(report, console, options.record)
    return 0


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "Bubbles of pipeline schedules beside their formulas.", windows=5, window_s=0.5)
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--micro-batches", type=harness.positive, nargs="+", default=[4, 8, 16], metavar="M",
                        help="multiples of the ranks; default: 4 8 16")  # fmt: skip
    parser.add_argument("--stage-ms", type=harness.from_zero, default=10.0,
                        help="a rank's wait for a forward; default: %(default)s")  # fmt: skip
    parser.add_argument("--width", type=harness.positive, default=512, help="of a layer; default: %(default)s")
    return parser.parse_args()


def chunks_of(schedule: str) -> int:
    return 2 if schedule == INTERLEAVED else 1


# --- waits ---


def waits(report: Report, comm: Communicator, options: argparse.Namespace, device: Device) -> None:
    """Add the table of bubbles where stages wait; collective."""
    grid = Grid(f"bubble, {comm.size} stages that wait {options.stage_ms:g} ms forward and twice that backward",
                ("schedule", "micro-batches", "formula", "measured", "min-max", "to formula"))  # fmt: skip
    for count in options.micro_batches:
        sides = {name: waiting(comm, name, count, options.stage_ms / 1e3, device) for name in SCHEDULES}
        samples = harness.alternate({name: partial(bubble, *side) for name, side in sides.items()}, options.windows)
        for name, (pipeline, _) in sides.items():
            found, formula = samples[name], pipeline.schedule.bubble
            spread = f"{found.low:.1%}-{found.high:.1%}"
            ratio = found.median / formula if formula else float("nan")
            grid.add(name, str(count), f"{formula:.1%}", f"{found.median:.1%}", spread, f"{ratio:.3f}x")
            if name == ONE_F_ONE_B and formula:
                what = f"1F1B's bubble with {count} micro-batches to its formula"
                report.bars.append(Bar(what, ratio, TARGET, at_least=False))
    report.grids.append(grid)


def waiting(
    comm: Communicator, schedule: str, count: int, seconds: float, device: Device
) -> tuple[Pipeline, np.ndarray]:
    """Return a pipeline whose stages wait, of equal work a rank, and a batch for it."""
    chunks = chunks_of(schedule)
    model = Sequential(*(WaitingLayer(seconds / chunks, device) for _ in range(comm.size * chunks)))
    pipeline = Pipeline(model, comm, loss=lambda y, _: y.sum(), micro_batches=count, schedule=schedule)
    return pipeline, np.zeros((count, _WIDTH), np.float32)


def bubble(pipeline: Pipeline, batch: np.ndarray, steps: int = 1) -> float:
    """Return the measured bubble of some steps; collective."""
    pipeline.reset_times()
    for _ in range(steps):
        pipeline.step(batch, batch)
        pipeline.zero_grad()
    return pipeline.bubble().measured


# --- activations ---


def activations(report: Report, comm: Communicator, options: argparse.Namespace, device: Device) -> None:
    """Add the table of the bytes that ranks keep; collective."""
    count = max(options.micro_batches)
    names = [f"rank {rank}" for rank in range(comm.size)]
    grid = Grid(f"peak activations of a GPT, {count} micro-batches of 2 x {_CONTEXT} tokens", ("schedule", *names))
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, (2 * count, _CONTEXT + 1)).astype(np.int32)
    most = {}
    for name in SCHEDULES:
        model = GPT(_VOCABULARY, _CONTEXT, 4 * comm.size, 64, 4, device=device, seed=0)
        pipeline = Pipeline(model, comm, loss=next_token_loss, micro_batches=count, schedule=name)
        del model
        for _ in range(2):
            pipeline.step(tokens[:, :-1], tokens[:, 1:])
            pipeline.zero_grad()
        peaks = comm.all_gather_object(pipeline.peak_activation_bytes)
        most[name] = max(peaks)
        grid.add(name, *map(format_size, peaks))
    report.grids.append(grid)
    ratio = most[ONE_F_ONE_B] / most[GPIPE]
    report.bars.append(Bar("1F1B's peak activations to GPipe's, on the rank with the most", ratio, 1.0, at_least=False))


# --- kernels ---


def kernels(report: Report, comm: Communicator, options: argparse.Namespace, device: Device) -> None:
    """Add the table of stages that compute, on as many ranks as there are cores; collective."""
    ranks = min(comm.size, len(usable_cores()))
    pair = comm.split(0 if comm.rank < ranks else None, name="pipeline")
    if pair is None:
        comm.rendezvous()
        return
    count = max(options.micro_batches)
    grid = Grid(f"{ranks} stages of {options.width}-wide layers that compute, {count} micro-batches of 64",
                ("schedule", "formula", "measured", "ms a step", "to one rank"))  # fmt: skip
    batch = np.random.default_rng(0).standard_normal((64 * count, options.width)).astype(np.float32)
    measures: dict[str, Callable[[], float]] = {"one rank": one_rank(pair, options.width, batch, count, device)}
    sides = {}
    for name in SCHEDULES:
        model = layers(options.width, 4 * ranks, device)
        sides[name] = Pipeline(model, pair, loss=F.mse_loss, micro_batches=count, schedule=name)
        measures[name] = partial(step_seconds, pair, sides[name], batch)
    samples = harness.alternate(measures, options.windows)
    for name, pipeline in sides.items():
        ratio = Ratio.of(Samples(tuple(1 / each for each in samples[name].values)),
                         Samples(tuple(1 / each for each in samples["one rank"].values)))  # fmt: skip
        measured = bubble(pipeline, batch, 3)
        milliseconds = f"{samples[name].median * 1e3:.1f}"
        grid.add(name, f"{pipeline.schedule.bubble:.1%}", f"{measured:.1%}", milliseconds, str(ratio))
    grid.add("one rank", "", "", f"{samples['one rank'].median * 1e3:.1f}", "")
    report.grids.append(grid)
    comm.rendezvous()


def layers(width: int, count: int, device: Device) -> Sequential:
    """Return equal layers, a multiple of the stages."""
    return Sequential(*(each for _ in range(count) for each in (Linear(width, width, device=device), ReLU())))


def one_rank(pair: Communicator, width: int, batch: np.ndarray, count: int, device: Device) -> Callable[[], float]:
    """Return a function that times a step of all layers on one rank, the others waiting; collective."""
    model = layers(width, 4 * pair.size, device)
    parts = np.split(batch, count)

    def seconds() -> float:
        pair.rendezvous()
        begin = time.perf_counter()
        if pair.rank == 0:
            train(model, parts, device)
        elapsed = time.perf_counter() - begin
        pair.rendezvous()
        return float(pair.broadcast(np.array([elapsed]))[0])

    return seconds


def train(model: Module, parts: Sequence[np.ndarray], device: Device) -> None:
    """Run forward and backward of all micro-batches."""
    for part in parts:
        x = Tensor(part, device)
        F.mse_loss(model(x), x).backward(1 / len(parts))
    device.finish()
    model.zero_grad()


def step_seconds(pair: Communicator, pipeline: Pipeline, batch: np.ndarray) -> float:
    """Return the slowest rank's seconds of a step; collective."""

    def step() -> None:
        pipeline.step(batch, batch)
        pipeline.zero_grad()

    return slowest_s(pair, step, 1)


if __name__ == "__main__":
    run(main)
