"""`python -m benchmarks.horovod_step`: a training step with clcomm.horovod beside PyTorch's DistributedDataParallel.

Horovod's own loop (`hvd.DistributedOptimizer`, on clcomm), the Synchronizer's and DistributedDataParallel's on gloo:
equal models take turns on the same batches of the same ranks. A step counts with the slowest rank's time over a window.
Losses have to agree. Horovod itself is not measured: it has no packages for current versions of PyTorch.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import clcomm.horovod as hvd
from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.on_ranks import relaunch, slowest_s
from benchmarks.torch_training import MODELS, Side, Trained, Wrap, sgd, trained_by_sgd, with_ddp
from clcomm import Synchronizer

PROGRAM = "benchmarks.horovod_step"
_WARM_UP_STEPS, _COMPARED_STEPS = 3, 8


def with_horovod(model: nn.Module) -> Trained:
    hvd.broadcast_parameters(model.state_dict(), 0)
    return Trained(model, hvd.DistributedOptimizer(sgd(model), model.named_parameters()))


def with_synchronizer(model: nn.Module) -> Trained:
    sync = Synchronizer(hvd.communicator())
    sync.broadcast_parameters(model)
    return trained_by_sgd(model, sync.sync_gradients)


WAYS: dict[str, Wrap] = {"clcomm.horovod": with_horovod, "Synchronizer": with_synchronizer, "DDP, gloo": with_ddp}


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
    sides = {name: Side(model, wrap) for name, wrap in WAYS.items()}
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
