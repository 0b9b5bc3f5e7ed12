"""Idea: gradients of the last layers travel while backward still computes those of the first ones.

    mpiexec -n 2 python -m examples.one_idea.overlap

Look at: with overlap buckets begin before backward has ended, so a part of each all-reduce is hidden behind the
computation; the parameters have the same bits either way. Whether a step is faster depends on the machine: ranks that
share their cores have no core to communicate with while they compute. `overlap="auto"` measures.
"""

import time

import numpy as np

from clcomm import Collective, Communicator, Synchronizer
from clcomm.engine import CrossEntropyLoss, Generator, Linear, ReLU, Sequential, Tensor
from clcomm.optim import SGD

STEPS, WARM = 20, 5


class Buckets:
    """An observer that keeps the all-reduces of gradients."""

    def __init__(self) -> None:
        self.seen: list[Collective] = []

    def collective_finished(self, event: Collective) -> None:
        if event.label == "gradients":
            self.seen.append(event)


def train(overlap: bool) -> bytes:
    """Train for some steps; print how many buckets began during backward, and return the parameters' bits."""
    buckets = Buckets()
    with Communicator(bucket_size="64KiB", observers=[buckets]) as comm:
        sync = Synchronizer(comm, overlap=overlap)
        weights = Generator(0)
        layers = [Linear(256, 256, rng=weights), ReLU(), Linear(256, 256, rng=weights), ReLU()]
        model = Sequential(*layers, Linear(256, 10, rng=weights))
        sync.broadcast_parameters(model)
        optimizer, loss_fn = SGD(model, lr=0.05), CrossEntropyLoss()
        random = np.random.default_rng(comm.rank)  # each rank has samples of its own
        early = total = 0
        hidden_s = 0.0
        for step in range(WARM + STEPS):
            images = Tensor(random.standard_normal((64, 256), np.float32))
            loss_fn(model(images), Tensor(random.integers(0, 10, 64))).backward()
            ended_s = time.perf_counter()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            if step >= WARM:  # the first ones build kernels
                total += len(buckets.seen)
                early += sum(event.began_s - event.queued_s < ended_s for event in buckets.seen)
                hidden_s += sum(e.seconds - e.exposed_s for e in buckets.seen if e.exposed_s is not None)
            buckets.seen.clear()
        if comm.rank == 0:
            print(f"overlap {overlap}: {early} of {total} buckets began during backward, {hidden_s:.4f} s hidden")
        return b"".join(parameter.numpy().tobytes() for parameter in model.parameters())


print(f"same bits: {train(False) == train(True)}")
