"""Idea: a training ends with the same bits on any number of ranks, dropout included.

    mpiexec -n 4 python -m examples.one_idea.any_ranks

Look at: every line has the same SHA-256 of the trained parameters. A step has eight logical shards, which one, two,
three or four ranks share out; each shard draws its own random numbers, and their gradients are summed in the shards'
order, whichever rank computed them.
"""

import hashlib
import sys

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.engine import CrossEntropyLoss, Dropout, Generator, Linear, ReLU, Sequential, Tensor, nn
from clcomm.optim import Adam

STEPS, SHARDS = 10, 8


def train(comm: Communicator) -> str:
    """Train from the same start on these ranks, and return the SHA-256 of the parameters."""
    nn.manual_seed(0)
    start = Generator(0)
    model = Sequential(Linear(64, 256, rng=start), ReLU(), Dropout(0.5), Linear(256, 10, rng=start))
    sync = Synchronizer(comm, shards=SHARDS)
    sync.broadcast_parameters(model)
    optimizer, loss_fn = Adam(model, lr=1e-3), CrossEntropyLoss()
    samples = [np.random.default_rng(shard) for shard in range(SHARDS)]
    assert sync.shards is not None
    for _ in range(STEPS):
        for shard in sync.shards.own:
            images, labels = samples[shard].standard_normal((32, 64), np.float32), samples[shard].integers(0, 10, 32)
            with sync.shard(model, shard):
                loss_fn(model(Tensor(images)), Tensor(labels)).backward()
        sync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.parameters())).hexdigest()


comm = Communicator()
found = []
for ranks in range(1, min(comm.size, SHARDS) + 1):
    part = comm.split(0 if comm.rank < ranks else None)
    found.append(comm.broadcast_object(None if part is None else train(part)))
    if comm.rank == 0:
        print(f"{ranks} rank{'s' * (ranks > 1):3}{found[-1]}")
if comm.rank == 0:
    print(f"same bits on 1 to {len(found)} ranks: {len(set(found)) == 1}")
sys.exit(len(set(found)) > 1)
