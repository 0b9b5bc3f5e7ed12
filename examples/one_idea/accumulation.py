"""Idea: gradients of several micro-batches add up, and travel once.

    mpiexec -n 2 python -m examples.one_idea.accumulation

Look at: four micro-batches a step need a quarter of the all-reduces, and reach the same loss as whole batches, to
rounding.
"""

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.engine import CrossEntropyLoss, Generator, Linear, Sequential, Tensor
from clcomm.optim import SGD

STEPS, BATCH = 10, 64


def train(micro_batches: int) -> tuple[float, int]:
    """Train for some steps; return the last loss and the number of all-reduces of gradients."""
    with Communicator() as comm:
        sync = Synchronizer(comm)
        model = Sequential(Linear(32, 10, rng=Generator(0)))
        sync.broadcast_parameters(model)
        optimizer, loss_fn = SGD(model, lr=0.5), CrossEntropyLoss()
        random = np.random.default_rng(comm.rank)
        images, labels = random.standard_normal((BATCH, 32), np.float32), random.integers(0, 10, BATCH)
        for _ in range(STEPS):
            *others, last = zip(np.split(images, micro_batches), np.split(labels, micro_batches), strict=True)
            total = 0.0

            def backward(part: tuple[np.ndarray, np.ndarray]) -> float:
                loss = loss_fn(model(Tensor(part[0])), Tensor(part[1])) * (1 / micro_batches)
                loss.backward()
                return loss.item()

            with sync.no_sync():  # all but the last: nothing is sent
                total += sum(map(backward, others))
            total += backward(last)
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return total, int(comm.stats.total("all_reduce", "gradients")["calls"])


for micro_batches in (1, 4):
    loss, calls = train(micro_batches)
    print(f"{STEPS * micro_batches} backwards: loss of this rank {loss:.4f}, {calls} all-reduces")
