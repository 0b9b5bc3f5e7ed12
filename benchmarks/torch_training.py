"""The PyTorch models of the benchmarks, and a side of a comparison: a model trained on the batch of its rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def convnet() -> nn.Module:
    """Return the examples' ConvNet of 206,922 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """Return the examples' MLP of 118,282 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


class Transformer(nn.Module):
    """An encoder, by default of 10 million parameters, that classifies an image by its rows."""

    def __init__(self, width: int = 320, layers: int = 8) -> None:
        super().__init__()
        self.rows = nn.Linear(28, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.rows(images[:, 0])).mean(1))


#: Each model, and a rank's images in a step.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "convnet": (convnet, 64),
    "mlp": (mlp, 64),
    "transformer": (Transformer, 4),
}


class Trained(NamedTuple):
    """A model that trains on all ranks, its optimizer, and what averages its gradients, if not backward itself."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Callable[[nn.Module], object] | None = None


#: Has a model train on all ranks.
Wrap = Callable[[nn.Module], Trained]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def trained_by_sgd(model: nn.Module, average: Callable[[nn.Module], object] | None = None) -> Trained:
    return Trained(model, sgd(model), average)


def with_ddp(model: nn.Module, group: dist.ProcessGroup | None = None) -> Trained:
    """Have DistributedDataParallel train a model with a group; None: that of all ranks."""
    return trained_by_sgd(DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True))


class Side:
    """One of MODELS, which `wrap` has train on all ranks, and this rank's batch; equal on all sides."""

    def __init__(self, name: str, wrap: Wrap):
        torch.manual_seed(0)
        make, batch = MODELS[name]
        self.model, self.optimizer, self.average = wrap(make())
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn((batch, 1, 28, 28), generator=generator)
        self.labels = torch.randint(0, 10, (batch,), generator=generator)

    def step(self) -> float:
        """Train on the batch once, and return the loss."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        if self.average is not None:
            self.average(self.model)
        self.optimizer.step()
        return loss.item()
