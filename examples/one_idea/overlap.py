"""Idea: gradients of the last layers travel while backward still computes those of the first ones.

    mpiexec -n 2 python -m examples.one_idea.overlap

Look at: with overlap buckets begin before backward has ended, so an all-reduce is partly hidden behind the computation;
the parameters have the same bits either way. Whether it is faster depends on the machine: `overlap="auto"` measures.
"""

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.engine import CrossEntropyLoss, Generator, Linear, ReLU, Sequential, Tensor
from clcomm.optim import SGD


def train(overlap: bool) -> tuple[bytes, float, float]:
    """Train for 20 steps; return the parameters' bits, and seconds of all-reduces exposed and hidden."""
    with Communicator(bucket_size="64KiB") as comm:
        sync = Synchronizer(comm, overlap=overlap)
        weights = Generator(0)
        layers = [Linear(256, 256, rng=weights), ReLU(), Linear(256, 256, rng=weights), ReLU()]
        model = Sequential(*layers, Linear(256, 10, rng=weights))
        sync.broadcast_parameters(model)
        optimizer, loss_fn = SGD(model, lr=0.05), CrossEntropyLoss()
        random = np.random.default_rng(comm.rank)  # each rank has samples of its own
        for _ in range(20):
            images = Tensor(random.standard_normal((64, 256), np.float32))
            loss_fn(model(images), Tensor(random.integers(0, 10, 64))).backward()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        spent = comm.stats.total("all_reduce", "gradients")
        bits = b"".join(parameter.numpy().tobytes() for parameter in model.parameters())
        if comm.rank == 0:
            print(f"overlap {overlap}: {spent['exposed_s']:.4f} s exposed, {spent['hidden_s']:.4f} s hidden")
        return bits, spent["exposed_s"], spent["hidden_s"]


with_overlap, without = train(True), train(False)
print(f"same bits: {with_overlap[0] == without[0]}")
