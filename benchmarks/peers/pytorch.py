"""The common parts of the PyTorch peers: model, optimizer, batches as tensors, and the number of threads."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.batches import Batch
from benchmarks.peers.worker import LR
from training.engines import torch_engine


class TorchSystem:
    """A PyTorch model with plain SGD; a peer defines `synchronise`, between backward and update."""

    def __init__(self, model: str, shape: tuple[int, ...], batches: list[Batch]):
        self.module: torch.nn.Module = torch_engine.make_module(model, shape, 10, seed=0)
        self.batches = [(torch.from_numpy(images), torch.from_numpy(labels).long()) for images, labels in batches]
        self._initial = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LR)
        self.forward: Any = self.module
        self._loss = torch.zeros(())

    def configure(self, settings: dict[str, Any]) -> None:
        threads = settings.get("threads", 1)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def reset(self) -> None:
        self.module.load_state_dict(self._initial)

    def step(self, number: int) -> None:
        images, labels = self.batches[number]
        self.optimizer.zero_grad()
        self._loss = torch.nn.functional.cross_entropy(self.forward(images), labels)
        self._loss.backward()
        self.synchronise()
        self.optimizer.step()

    def synchronise(self) -> None:
        """Average the gradients over the ranks."""

    def finish(self) -> dict[str, Any]:
        return {"loss": self._loss.item()}
