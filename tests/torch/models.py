"""Small models and batches, and one process's training on all ranks' batches, which distributed training equals."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

FEATURES, CLASSES = 12, 5


class Net(nn.Module):
    """Two branches, of which a batch may use one; a shared and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.left, self.right = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, images: torch.Tensor, branch: str = "both") -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(images)))
        hidden = self.second(torch.tanh(hidden)) + self.frozen(hidden)
        left = self.left(hidden) if branch != "right" else 0
        return left + (self.right(hidden) if branch != "left" else 0)


class Normed(nn.Module):
    """A convolutional net with BatchNorm: buffers that DistributedDataParallel sends."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images[:, :9].reshape(-1, 1, 3, 3))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a float64 model with parameters of this seed."""
    torch.manual_seed(seed)
    return make().double()


def batch(rank: int, step: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rank's images and labels at a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, CLASSES, (size,), generator=generator)


def train_alone(model: nn.Module, steps: int, make_optimizer: Callable, **forward) -> tuple[nn.Module, list[float]]:
    """Train a copy on all ranks' batches, in this process; return it and this rank's losses."""
    model = copy.deepcopy(model)
    optimizer, losses, size = make_optimizer(model.parameters()), [], dist.get_world_size()
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            images, labels = batch(rank, step)
            loss = nn.functional.cross_entropy(model(images, **forward), labels)
            (loss / size).backward()
            if rank == dist.get_rank():
                losses.append(loss.item())
        optimizer.step()
    return model, losses


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer, **forward) -> list[float]:
    """Train a distributed model on this rank's batches; return its losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        images, labels = batch(dist.get_rank(), step)
        loss = nn.functional.cross_entropy(model(images, **forward), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1, momentum=0.9)


def require_close(one: nn.Module, other: nn.Module, tolerance: float = 1e-12) -> None:
    """Compare all parameters and buffers of two models by name."""
    for (name, mine), (_, theirs) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=name)
