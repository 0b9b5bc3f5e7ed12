"""`python -m benchmarks.torch_ddp`: DistributedDataParallel on backend clcomm beside DistributedDataParallel on gloo.

One script, two process groups of the same ranks: equal models take turns on the same batches, one wrapped with each
group. A step counts with the slowest rank's time over a window. Communication is an all-reduce of a bucket of the
given size alone, as DistributedDataParallel's reducer calls it, with nothing else to do: on clcomm in shared memory, as
buckets are from the first steps on, and, beside it, of a tensor that has to be copied. Losses have to agree, and
those of the transformer with `fully_shard` with those of one rank.

Two more sides say how much could be less at most: `memory` reads and writes what an all-reduce of all ranks' buckets
has to, each rank its part, without waiting for others; `alone` is a step of the same model without communication.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Ratio, Report
from benchmarks.on_ranks import relaunch, slowest_s
from benchmarks.torch_training import MODELS, Side, Transformer, trained_by_sgd, with_ddp
from clcomm.base.units import format_size
from clcomm.comm.transport.reduction import prepared_reduction

PROGRAM = "benchmarks.torch_ddp"
#: Bytes of the buckets whose all-reduce is measured alone: from the bar's size to DDP's largest.
BUCKETS = (256 << 10, 1 << 20, 4 << 20, 25 << 20)
_WARM_UP_STEPS, _COMPARED_STEPS = 3, 8


def main() -> int:
    options, console = parse(), harness.make_console()
    ended = relaunch(PROGRAM, options.ranks)
    if ended is not None:
        return ended
    import clcomm.torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group("clcomm")
    groups = {"clcomm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    comm = clcomm.torch.communicator()
    report = Report(f"PyTorch DDP on clcomm and on gloo, {comm.size} ranks", harness.command_line(PROGRAM))
    measure_buckets(report, comm, options, groups)
    columns = ("model", "images", "clcomm ms", "gloo ms", "alone ms", "images/s", "of gloo's", "at most", "loss apart")
    steps = Grid("A training step", columns)
    for model in options.model:
        measure_steps(report, steps, comm, options, model, groups)
    report.grids.append(steps)
    if "transformer" in options.model:
        compare_sharded(report, comm)
    if comm.rank == 0:
        harness.conclude(report, console, options.record)
    dist.destroy_process_group()
    return 0


def measure_buckets(report: Report, comm, options: argparse.Namespace, groups: dict) -> None:
    """Time an all-reduce of each size alone."""
    import clcomm.torch

    columns = ("bucket", "clcomm ms", "copied ms", "gloo ms", "memory ms", "less", "less, copied", "at most")
    grid = Grid("An all-reduce alone", columns)
    for nbytes in BUCKETS:
        tensor, bucket = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
        clcomm.torch.share(bucket)
        calls: dict[str, Callable[[], object]] = {
            "clcomm": partial(dist.all_reduce, bucket, group=groups["clcomm"]),
            "copied": partial(dist.all_reduce, tensor, group=groups["clcomm"]),
            "gloo": partial(dist.all_reduce, tensor, group=groups["gloo"]),
            "memory": part_of_a_sum(nbytes, comm.size),
        }
        repeats = harness.repeats_for(slowest_s(comm, calls["gloo"], 3), options.window_s)
        samples = harness.alternate(
            {name: partial(slowest_s, comm, call, repeats) for name, call in calls.items()}, options.windows
        )
        ratios = [Ratio.of(samples["gloo"], samples[name]) for name in ("clcomm", "copied", "memory")]
        grid.add(format_size(nbytes), *(f"{each.median * 1e3:.3f}" for each in samples.values()), *map(str, ratios))
        target = Bar(f"less communication for {format_size(nbytes)} on {comm.size} ranks", ratios[0].value, 10)
        report.bars.append(target)
    report.grids.append(grid)


def part_of_a_sum(nbytes: int, ranks: int) -> Callable[[], None]:
    """Return a rank's part of a sum of all ranks' buckets: it reads and writes its shard of each, once."""
    rows = [np.zeros(nbytes // 4 // ranks, np.float32) for _ in range(ranks)]
    return prepared_reduction(rows, rows[0], "sum", copies=rows[1:])


def measure_steps(report: Report, grid: Grid, comm, options: argparse.Namespace, model: str, groups: dict) -> None:
    """Time a model's step on both backends, and compare its losses."""
    batch = MODELS[model][1]
    sides = {name: Side(model, partial(with_ddp, group=group)) for name, group in groups.items()}
    losses = {name: [side.step() for _ in range(_COMPARED_STEPS)] for name, side in sides.items()}
    apart = max(abs(a - b) for a, b in zip(losses["clcomm"], losses["gloo"], strict=True))
    once = slowest_s(comm, sides["gloo"].step, _WARM_UP_STEPS)
    repeats = harness.repeats_for(once, options.window_s)
    sides["alone"] = Side(model, trained_by_sgd)
    samples = harness.alternate(
        {name: partial(slowest_s, comm, side.step, repeats) for name, side in sides.items()}, options.windows
    )
    ratio, most = (Ratio.of(samples["gloo"], samples[name]) for name in ("clcomm", "alone"))
    rate = batch * comm.size / samples["clcomm"].median
    times = (f"{samples[name].median * 1e3:.2f}" for name in samples)
    grid.add(model, str(batch * comm.size), *times, f"{rate:,.0f}", str(ratio), str(most), f"{apart:.1e}")
    target = 1.15 if model == "convnet" else 1.0
    report.bars.append(Bar(f"images/s of the {model} on {comm.size} ranks", ratio.value, target))
    report.bars.append(Bar(f"losses of the {model} on {comm.size} ranks apart", apart, 1e-6, "", at_least=False))


def sharded_losses(make: Callable[[], Transformer], batch: int, steps: int) -> tuple[list[float], list[float]]:
    """Train a transformer with `fully_shard` on all ranks, and alone on all of their batches; return both's losses."""
    torch.manual_seed(0)
    alone = make()
    model = copy.deepcopy(alone)
    for layer in model.layers.layers:
        fully_shard(layer)
    fully_shard(model)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn((batch * dist.get_world_size(), 1, 28, 28), generator=generator)
    labels = torch.randint(0, 10, (len(images),), generator=generator)
    mine = slice(batch * dist.get_rank(), batch * (dist.get_rank() + 1))
    losses: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for found, part, each in zip(losses, (mine, slice(None)), (model, alone), strict=True):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-4)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(each(images[part]), labels[part])
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
    together = torch.stack(losses[0])
    dist.all_reduce(together, dist.ReduceOp.AVG)
    return together.tolist(), torch.stack(losses[1]).tolist()


def compare_sharded(report: Report, comm) -> None:
    """Compare the losses of the whole transformer, sharded and on one rank."""
    sharded, alone = sharded_losses(Transformer, MODELS["transformer"][1], _COMPARED_STEPS)
    apart = max(abs(one - other) for one, other in zip(sharded, alone, strict=True))
    what = f"losses of the transformer with fully_shard on {comm.size} ranks from those of one rank"
    report.bars.append(Bar(what, apart, 1e-5, "", at_least=False))


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "DistributedDataParallel on clcomm and on gloo.", windows=7, window_s=0.5)
    parser.add_argument("--ranks", type=harness.positive, default=4, help="default: %(default)s")
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
