"""On MPI ranks: training steps with the plain optimizer (stage 0) and with sharded ones, each with its own model."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import numpy as np

from benchmarks.workers import serve
from clcomm import Communicator, Synchronizer
from clcomm.engine import CrossEntropyLoss, Device, Generator, Linear, Module, ReLU, Sequential, Tensor
from clcomm.optim import SGD, Adam
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import GPT, MLP, ConvNet
from models.gpt import next_token_loss

OPTIMIZERS = {"sgd": lambda model: SGD(model, 1e-3, momentum=0.9), "adam": lambda model: Adam(model, 1e-4)}
#: Units of the wide model's hidden layers: 5.3 million parameters.
WIDE = (784, 2048, 1800, 10)
#: Tokens that GPT knows and sees, and images whose place a sequence takes in a batch.
TOKENS, CONTEXT, _IMAGES_A_SEQUENCE = 98, 256, 8
_SETTLING_STEPS = 3


def wide_model(device: Device) -> Module:
    """Return an MLP whose parameters matter more than its arithmetic."""
    rng = Generator(0)
    layers: list[Module] = []
    for inputs, outputs in itertools.pairwise(WIDE):
        layers += [Linear(inputs, outputs, rng=rng, device=device), ReLU()]
    return Sequential(*layers[:-1])


def make_model(name: str, device: Device) -> Module:
    """Return a model with values of a seed: "mlp", "convnet", "gpt" or "wide"."""
    if name == "wide":
        return wide_model(device)
    if name == "gpt":
        return GPT(TOKENS, CONTEXT, device=device, seed=0)
    return (MLP if name == "mlp" else ConvNet)((1, 28, 28), 10, device=device, seed=0)


def make_batch(name: str, images: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a rank's inputs and labels: so many images, or sequences in their place."""
    rng = np.random.default_rng(rank)
    if name == "gpt":
        tokens = rng.integers(0, TOKENS, (2, max(1, images // _IMAGES_A_SEQUENCE), CONTEXT), dtype=np.int32)
        return tokens[0], tokens[1]
    shape = (images, 784) if name == "wide" else (images, 1, 28, 28)
    return rng.standard_normal(shape).astype(np.float32), rng.integers(0, 10, images).astype(np.int32)


class System:
    """One model with its optimizer; a step is forward, backward, sync_gradients, step."""

    def __init__(self, comm: Communicator, device: Device, model: str, optimizer: str, stage: int, batch: int):
        self.model = make_model(model, device)
        self.inputs, self.labels = (Tensor(array, device) for array in make_batch(model, batch, comm.rank))
        self.sync, self.device = Synchronizer(comm, zero=stage or 1), device
        self.loss = next_token_loss if model == "gpt" else CrossEntropyLoss()
        self.optimizer: Any = OPTIMIZERS[optimizer](self.model)
        if stage:
            self.optimizer = DistributedOptimizer(self.optimizer, self.sync)
        self.sync.broadcast_parameters(self.model)
        self.nbytes = self.model.flat_space().layout.nbytes

    def step(self) -> None:
        self.loss(self.model(self.inputs), self.labels).backward()
        self.sync.sync_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    comm = Communicator()
    device = Device.select(local_rank=comm.local_rank, local_size=comm.local_size, cores=comm.cores)
    systems: dict[tuple, System] = {}

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        key = request["model"], request["optimizer"], request["stage"], request["batch"]
        if key not in systems:
            systems[key] = System(comm, device, *key)
        system = systems[key]
        for _ in range(_SETTLING_STEPS):
            system.step()
        device.finish()
        start, used = time.monotonic(), time.process_time()
        for _ in range(request["steps"]):
            system.step()
        device.finish()
        used = time.process_time() - used
        return {"start": start, "stop": time.monotonic(), "cpu": used, "nbytes": system.nbytes}

    serve(sys.argv[1], comm.rank, handle)


if __name__ == "__main__":
    main()
