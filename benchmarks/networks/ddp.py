"""PyTorch's side: DistributedDataParallel over gloo, one thread a rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.networks.worker import options, work
from benchmarks.networks.workload import Workload, initial_weights
from benchmarks.peers.batches import Batch
from clcomm.engine import weights
from training.engines import torch_engine, torch_gpt


class Ddp:
    """DDP with its faster settings: gradients in its buckets, no buffers sent, an optimizer of fused kernels."""

    def __init__(self, workload: Workload, batches: list[Batch], folder: Path):
        is_gpt = workload.network == "gpt"
        self.module: Any = (torch_gpt.TorchGPT if is_gpt else torch_engine.ResNet)(**workload.sizes)
        state = weights.load(initial_weights(folder))
        self.module.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
        self.model = DistributedDataParallel(self.module, gradient_as_bucket_view=True, broadcast_buffers=False)
        self.batches = [(torch.from_numpy(inputs), torch.from_numpy(labels).long()) for inputs, labels in batches]
        self._loss_fn = torch_gpt.next_token_loss if is_gpt else torch.nn.functional.cross_entropy
        kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        self.optimizer = kinds[workload.optimizer](
            self.module.parameters(), lr=workload.lr, fused=True, **workload.optimizer_settings
        )
        self._loss = torch.zeros(())

    def step(self, number: int) -> None:
        """Train on a batch."""
        inputs, labels = self.batches[number]
        self.optimizer.zero_grad()
        self._loss = self._loss_fn(self.model(inputs), labels)
        self._loss.backward()
        self.optimizer.step()

    def finish(self) -> dict[str, Any]:
        """Return the last loss."""
        return {"loss": self._loss.item()}

    def logits(self, inputs: np.ndarray) -> np.ndarray:
        """Return what the network, in evaluation, has for a batch."""
        self.module.eval()
        with torch.no_grad():
            found = self.module(torch.from_numpy(inputs)).numpy()
        self.module.train()
        return found


def main() -> None:
    given = options()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = f"file://{Path(given.directory, 'store')}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    work(given, rank, lambda workload, batches: Ddp(workload, batches, given.folder))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
