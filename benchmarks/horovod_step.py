"""`python -m benchmarks.horovod_step`: a training step with clcomm.horovod beside PyTorch's DistributedDataParallel.

Horovod's own loop (`hvd.DistributedOptimizer`, on clcomm), the Synchronizer's and DistributedDataParallel's on gloo:
equal models take turns on the same batches of the same ranks. A step counts with the slowest rank's time over a window.
Losses have to agree. Horovod itself is not measured: it has no packages for current versions of PyTorch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import clcomm.horovod as hvd
from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.on_ranks import relaunch, slowest_s
from benchmarks.torch_ddp import MODELS
from clcomm import Synchronizer

PROGRAM = "benchmarks.horovod_step"
_WARM_UP_STEPS, _COMPARED_STEPS = 3, 8


class Side:
    """A model, its optimizer and its batches; `wrap` makes the model and the optimizer train on all ranks."""

    def __init__(self, model: str, wrap: Callable[[nn.Module], tuple], batch: int):
        torch.manual_seed(0)
        self.model, self.optimizer, self.average = wrap(MODELS[model][0]())
        generator = torch.Generator().manual_seed(hvd.rank())
        self.images = torch.randn((batch, 1, 28, 28), generator=generator)
        self.labels = torch.randint(0, 10, (batch,), generator=generator)

    def step(self) -> float:
        """Train on the batch once, and return the loss."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.average(self.model)
        self.optimizer.step()
        return loss.item()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def with_horovod(model: nn.Module) -> tuple:
    hvd.broadcast_parameters(model.state_dict(), 0)
    return model, hvd.DistributedOptimizer(sgd(model), model.named_parameters()), lambda model: None


def with_synchronizer(model: nn.Module) -> tuple:
    sync = Synchronizer(hvd.communicator())
    sync.broadcast_parameters(model)
    return model, sgd(model), sync.sync_gradients


def with_ddp(model: nn.Module) -> tuple:
    return DistributedDataParallel(model, gradient_as_bucket_view=True), sgd(model), lambda model: None


WAYS = {"clcomm.horovod": with_horovod, "Synchronizer": with_synchronizer, "DDP, gloo": with_ddp}


def main() -> int:
    options, console = parse(), harness.make_console()
    ended = relaunch(PROGRAM, options.ranks)
    if ended is not None:
        return ended
    import clcomm.torch  # noqa: F401 - sets the variables by which gloo finds the ranks

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    hvd.init()
    dist.init_process_group("gloo")
    comm = hvd.communicator()
    report = Report(f"Horovod's loop on clcomm, {comm.size} ranks", harness.command_line(PROGRAM))
    headings = "model", "images", *(f"{name} ms" for name in WAYS), "of DDP's", "of Synchronizer's", "loss apart"
    grid = Grid("A training step", headings)
    for model in options.model:
        measure(report, grid, comm, options, model)
    report.grids.append(grid)
    if comm.rank == 0:
        harness.conclude(report, console, options.record)
    dist.destroy_process_group()
    hvd.shutdown()
    return 0


def measure(report: Report, grid: Grid, comm, options: argparse.Namespace, model: str) -> None:
    """Time a model's step in each way, and compare the losses."""
    batch = MODELS[model][1]
    sides = {name: Side(model, wrap, batch) for name, wrap in WAYS.items()}
    losses = [[side.step() for _ in range(_COMPARED_STEPS)] for side in sides.values()]
    apart = max(max(each) - min(each) for each in zip(*losses, strict=True))
    repeats = harness.repeats_for(slowest_s(comm, sides["DDP, gloo"].step, _WARM_UP_STEPS), options.window_s)
    samples = harness.alternate(
        {name: partial(slowest_s, comm, side.step, repeats) for name, side in sides.items()}, options.windows
    )
    to_ddp, to_ours = (Ratio.of(samples[name], samples["clcomm.horovod"]) for name in ("DDP, gloo", "Synchronizer"))
    times = (f"{each.median * 1e3:.2f}" for each in samples.values())
    grid.add(model, str(batch * comm.size), *times, str(to_ddp), str(to_ours), f"{apart:.1e}")
    report.bars.append(Bar(f"images/s of the {model} on {comm.size} ranks, to DDP on gloo", to_ddp.value, 1.0))
    report.bars.append(Bar(f"losses of the {model} on {comm.size} ranks apart", apart, 1e-6, "", at_least=False))


def parse() -> argparse.Namespace:
    parser = harness.parser(
        PROGRAM, "Horovod's loop on clcomm beside DistributedDataParallel.", windows=7, window_s=0.5
    )
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=["convnet", "mlp"])
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
