"""Models with a plain or a sharded update, and batches that are each rank's own."""

from __future__ import annotations

import numpy as np

from clcomm import Synchronizer
from clcomm.engine import CrossEntropyLoss, Device, Generator, Linear, Tensor
from clcomm.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RMSProp
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import MLP
from tests.helpers import cpu_device

KINDS = {
    "sgd": lambda model: SGD(model, 0.05, weight_decay=0.01),
    "momentum": lambda model: SGD(model, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda model: Adam(model, 2e-3),
    "adamw": lambda model: AdamW(model, 2e-3),
    "adadelta": lambda model: Adadelta(model, 0.5),
    "adagrad": lambda model: Adagrad(model, 0.02, lr_decay=0.1),
    "rmsprop": lambda model: RMSProp(model, 1e-3, momentum=0.9, centered=True),
}

SHAPE = (1, 8, 8)


def cpu() -> Device:
    return cpu_device("cpu")


def discrete() -> Device:
    """A device whose memory counts as its own."""
    return cpu_device("gpu")


class Job:
    """A model with its optimizer on a rank, and batches that are the rank's own."""

    def __init__(self, comm, kind="momentum", sharded=True, model=MLP, make_device=cpu, **options):
        self.comm, self.device = comm, make_device()
        self.model = model(SHAPE, 10, device=self.device, seed=comm.rank)
        self.sync = Synchronizer(comm, **options)
        self.optimizer = KINDS[kind](self.model)
        if sharded:
            self.optimizer = DistributedOptimizer(self.optimizer, self.sync)
        self.sync.broadcast_parameters(self.model)

    def backward(self, number, micro=0, share=1.0):
        """Run one micro-batch, which counts for a share of its step."""
        rng = np.random.default_rng([number, self.comm.rank, micro])
        images = rng.standard_normal((3, *SHAPE)).astype(np.float32)
        labels = Tensor(rng.integers(0, 10, 3).astype(np.int32), self.device)
        CrossEntropyLoss()(self.model(Tensor(images, self.device)), labels).backward(share)

    def step(self, number, micro_batches=1):
        for micro in range(micro_batches):
            self.backward(number, micro, 1 / micro_batches)
            if micro < micro_batches - 1:
                with self.sync.no_sync():
                    self.sync.sync_gradients(self.model)
        self.sync.sync_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps, start=0, **options):
        for number in range(start, start + steps):
            self.step(number, **options)
        return self.model.state_dict()


def tiny_model(seed):
    return Linear(3, 2, rng=Generator(seed))
