"""Idea: a training ends with the same bits at any bucket size, per tensor, with overlap, and through any transport.

    mpiexec -n 4 python -m examples.one_idea.same_bits

Look at: every line has the same SHA-256 of the trained parameters. Sums of three floating-point numbers and more depend
on their order, and a reduction that divides a bucket between the ranks adds in an order that depends on its size. Here
each element is added in the order of the ranks, however it travels. Two ranks would prove nothing: a + b is b + a.
"""

import hashlib
import sys
from typing import Any

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.engine import CrossEntropyLoss, Generator, Linear, ReLU, Sequential, Tensor
from clcomm.optim import SGD

STEPS = 10
WAYS: dict[str, dict[str, Any]] = {
    "one bucket": {"bucket_size": "1MiB"},
    "buckets of 16 KiB": {"bucket_size": "16KiB"},
    "per tensor": {"use_bucketing": False},
    "16 KiB, overlapped": {"bucket_size": "16KiB", "overlap": True},
    "one bucket, MPI": {"bucket_size": "1MiB", "transport": "mpi"},
    "per tensor, MPI": {"use_bucketing": False, "transport": "mpi"},
}


def train(overlap: bool = False, **settings: Any) -> str:
    """Train from the same start in one way, and return the SHA-256 of the parameters."""
    with Communicator(**settings) as comm:
        sync = Synchronizer(comm, overlap=overlap)
        start = Generator(0)
        model = Sequential(
            Linear(64, 256, rng=start), ReLU(), Linear(256, 128, rng=start), ReLU(), Linear(128, 10, rng=start)
        )
        sync.broadcast_parameters(model)
        optimizer, loss_fn = SGD(model, lr=0.1, momentum=0.9), CrossEntropyLoss()
        random = np.random.default_rng(comm.rank)  # each rank has samples of its own
        for _ in range(STEPS):
            images, labels = random.standard_normal((32, 64), np.float32), random.integers(0, 10, 32)
            loss_fn(model(Tensor(images)), Tensor(labels)).backward()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.parameters())).hexdigest()


comm = Communicator()
found = {way: train(**settings) for way, settings in WAYS.items()}
everyone = comm.all_gather_object(found)
same = len({digest for each in everyone for digest in each.values()}) == 1
if comm.rank == 0:
    for way, digest in found.items():
        print(f"{way:20}{digest}")
    print(f"same bits on {comm.size} ranks in {len(WAYS)} ways: {same}")
sys.exit(not same)
