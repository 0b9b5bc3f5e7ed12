"""This project's side: the native engine under Communicator, Synchronizer and clcomm.optim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.networks.worker import options, work
from benchmarks.networks.workload import Workload, initial_weights
from benchmarks.peers.batches import Batch
from clcomm import Communicator, Synchronizer
from clcomm.engine import CrossEntropyLoss, Device, weights
from models.gpt import next_token_loss
from training.engines.parts import native_parts


class Native:
    """A network that trains as the Trainer trains it."""

    def __init__(self, workload: Workload, batches: list[Batch], folder: Path, comm: Communicator):
        self.device = Device.select(local_rank=comm.local_rank, local_size=comm.local_size, cores=comm.cores)
        model = workload.module(self.device)
        weights.load_into(model, initial_weights(folder))
        loss_fn = next_token_loss if workload.network == "gpt" else CrossEntropyLoss()
        self.parts, self.batches = native_parts(model, loss_fn, self.device), batches
        self.sync = Synchronizer(comm)
        self.optimizer = self.parts.make_optimizer(workload.optimizer, workload.lr, **workload.optimizer_settings)
        self.sync.broadcast_parameters(model)
        self._loss: Any = None

    def step(self, number: int) -> None:
        """Train on a batch."""
        self._loss = self.parts.forward_backward(*self.parts.prepare(*self.batches[number]), 1.0)
        self.sync.sync_gradients(self.parts.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> dict[str, Any]:
        """Wait for the device and return the last loss."""
        self.device.finish()
        return {"loss": self._loss.item()}

    def logits(self, inputs: np.ndarray) -> np.ndarray:
        """Return what the network, in evaluation, has for a batch."""
        return self.parts.predict(inputs)


def main() -> None:
    given, comm = options(), Communicator()
    work(given, comm.rank, lambda workload, batches: Native(workload, batches, given.folder, comm))


if __name__ == "__main__":
    main()
