"""Idea: each rank keeps a part of the gradients and of the optimizer's state, not all of both (ZeRO, stage 2).

    mpiexec -n 2 python -m examples.one_idea.zero

Look at: with N ranks the two take about 1 / N of the memory a rank, and the parameters have the same bits.
"""

import numpy as np

from clcomm import Communicator, DistributedOptimizer, Synchronizer
from clcomm.engine import CrossEntropyLoss, Generator, Linear, ReLU, Sequential, Tensor
from clcomm.optim import Adam


def train(zero: int) -> bytes:
    """Train for 10 steps with or without ZeRO; print what a rank keeps, and return the parameters' bits."""
    with Communicator() as comm:
        sync = Synchronizer(comm, zero=zero, bucket_size="32KiB") if zero else Synchronizer(comm)
        weights = Generator(0)
        model = Sequential(Linear(128, 256, rng=weights), ReLU(), Linear(256, 10, rng=weights))
        plain, loss_fn = Adam(model, lr=0.001), CrossEntropyLoss()
        optimizer = DistributedOptimizer(plain, sync) if zero else plain
        sync.broadcast_parameters(model)
        gradients = sum(parameter.numpy().nbytes for parameter in model.parameters())
        random = np.random.default_rng(comm.rank)
        for _ in range(10):
            images = Tensor(random.standard_normal((32, 128), np.float32))
            loss_fn(model(images), Tensor(random.integers(0, 10, 32))).backward()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, DistributedOptimizer):
            gradients = optimizer.memory().gradients
        state = optimizer.state_nbytes
        print(
            f"rank {comm.rank}, stage {zero}: {gradients:,} bytes of gradients, {state:,} of Adam's state", flush=True
        )
        comm.barrier()
        return b"".join(parameter.numpy().tobytes() for parameter in model.parameters())


print(f"same bits: {train(0) == train(2)}")
