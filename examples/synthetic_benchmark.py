"""Images or tokens a second on random data: `mpiexec -n 4 python -m examples.synthetic_benchmark --model resnet`.

As Horovod's benchmark of this name: a batch of random numbers, trained on again and again by every rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import numpy as np

from clcomm import Communicator, Synchronizer, run
from clcomm.base.host import require_memory
from clcomm.comm.collectives.same_start import declare
from training.command_line import parse
from training.console import make_console
from training.engines.build_together import build_together
from training.engines.gpt import gpt_parts
from training.engines.parts import Parts, Placement, build_parts
from training.synthetic_options import SyntheticOptions

CLASSES, TOKENS = 10, 98
LR = 0.01


def main() -> int:
    options = parse(
        "examples.synthetic_benchmark", "Measure the training of a model on random data, over MPI.", SyntheticOptions
    )
    declare("examples.synthetic_benchmark", options)
    comm = Communicator(bucket_size=options.bucket_size)
    console = make_console(comm)
    parts, batch = workload(options, comm)
    step = stepper(options, comm, parts, batch)
    console.print(f"Model: {options.model}, {parts.device}\nBatch size: {options.batch_size}", highlight=False)
    console.print(f"Number of ranks: {comm.size}", highlight=False)
    unit = "tokens" if options.model == "gpt" else "img"
    samples = batch[1].size  # an image has one label, a sequence one for each token
    seconds_of(comm, step, options.num_warmup_batches)
    rates = []
    for number in range(options.num_iters):
        seconds = seconds_of(comm, step, options.num_batches_per_iter)
        rates.append(samples * options.num_batches_per_iter / seconds)
        console.print(f"Iter #{number}: {rates[-1]:,.1f} {unit}/sec per rank", highlight=False)
    mean, spread = statistics.mean(rates), 1.96 * statistics.pstdev(rates)
    console.print(f"{unit.capitalize()}/sec per rank: {mean:,.1f} +-{spread:,.1f}", highlight=False)
    total, spread = comm.size * mean, comm.size * spread
    console.print(f"Total {unit}/sec on {comm.size} rank(s): {total:,.1f} +-{spread:,.1f}", highlight=False)
    return 0


def workload(options: SyntheticOptions, comm: Communicator) -> tuple[Parts, tuple[np.ndarray, np.ndarray]]:
    """Return the model's parts, and this rank's batch and labels."""
    place = Placement(options.device, comm.local_rank, comm.local_size, comm.cores)
    random, size = np.random.default_rng(comm.rank), options.batch_size
    if options.model == "gpt":
        text = random.integers(0, TOKENS, (size, options.context + 1), dtype=np.int32)
        parts = gpt_parts(place.opencl(), 0, TOKENS, options.context)
        return parts, (np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:]))
    nbytes = 2 * 4 * size * math.prod(options.image_shape)  # with their gradient
    require_memory("batch_size", size, nbytes, comm.local_size)
    images = random.standard_normal((size, *options.image_shape), np.float32)
    parts = build_parts(options.engine, options.model, options.image_shape, CLASSES, 0, place)
    return parts, (images, random.integers(0, CLASSES, size, dtype=np.int32))


def stepper(
    options: SyntheticOptions, comm: Communicator, parts: Parts, batch: tuple[np.ndarray, np.ndarray]
) -> Callable[[], float]:
    """Return what trains on the batch once and returns the loss."""
    if parts.opencl is not None and parts.rehearse is not None:  # kernels are built once for all ranks of a host
        rehearse, size, ways = parts.rehearse, options.batch_size, (options.compression, options.precision)
        identity = repr((options.model, options.image_shape, options.context, size, *ways, comm.size))
        rows = comm.local_size, comm.local_size if comm.local_size == comm.size else 1
        build_together(comm, parts.opencl, lambda: rehearse((size,), "sgd", LR, {}, *rows, *ways), identity)
    sync = Synchronizer(comm, compression=options.compression, precision=options.precision)
    optimizer = parts.make_optimizer("sgd", LR)
    sync.broadcast_parameters(parts.model)

    def step() -> float:
        loss = parts.forward_backward(*parts.prepare(*batch), 1.0)
        sync.sync_gradients(parts.model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def seconds_of(comm: Communicator, step: Callable[[], float], repeats: int) -> float:
    """Return how long the slowest rank takes for so many steps."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    return float(comm.all_reduce(np.array([time.perf_counter() - begin]), op="max")[0])


if __name__ == "__main__":
    run(main)
