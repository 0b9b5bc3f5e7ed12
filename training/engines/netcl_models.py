"""The MLP and the ConvNet of `models`, built of netcl's layers. N C H W: images, channels, height, width."""

from __future__ import annotations

import math
from typing import Any

from netcl import nn

from clcomm.base.errors import ArgumentError
from clcomm.engine import Generator
from clcomm.engine.nn.init import layer_values
from clcomm.sync.adapters.netcl import NetclModel


class MLP(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes], through two hidden layers of 128 with ReLU."""

    def __init__(self, queue: Any, in_shape: tuple[int, ...], classes: int):
        self.fc1 = nn.Linear(queue, math.prod(in_shape), 128)
        self.fc2 = nn.Linear(queue, 128, 128)
        self.fc3 = nn.Linear(queue, 128, classes)
        self.relu, self.flatten = nn.ReLU(), nn.Flatten()

    def forward(self, x: Any) -> Any:
        x = self.relu(self.fc1(self.flatten(x)))
        return self.fc3(self.relu(self.fc2(x)))


class ConvNet(nn.Module):
    """Images [N, C, H, W] -> logits [N, classes]: twice 3x3 convolution, ReLU and 2x2 max-pool, then two layers."""

    def __init__(self, queue: Any, in_shape: tuple[int, ...], classes: int):
        channels, height, width = in_shape
        self.conv1 = nn.Conv2d(queue, channels, 16, 3, pad=1)
        self.conv2 = nn.Conv2d(queue, 16, 32, 3, pad=1)
        self.fc1 = nn.Linear(queue, 32 * (height // 4) * (width // 4), 128)
        self.fc2 = nn.Linear(queue, 128, classes)
        self.relu, self.pool, self.flatten = nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten()

    def forward(self, x: Any) -> Any:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        return self.fc2(self.relu(self.fc1(self.flatten(x))))


def make_module(model: str, in_shape: tuple[int, ...], classes: int, seed: int, queue: Any) -> nn.Module:
    """Return "mlp" or "convnet" on an OpenCL queue, with PyTorch's initial values for the seed."""
    if model == "convnet" and (len(in_shape) != 3 or min(in_shape[1:]) < 4):
        raise ArgumentError(f"in_shape: expected (channels, height, width) of at least 4 x 4, got {in_shape}")
    module = (ConvNet if model == "convnet" else MLP)(queue, in_shape, classes)
    rng = Generator(seed)
    parameters = dict(NetclModel(module).named_parameters())
    for name, weight in parameters.items():
        if name.endswith(".weight"):
            weight_values, bias_values = layer_values(weight.shape, True, rng)
            weight.copy_from(weight_values)
            parameters[name.replace(".weight", ".bias")].copy_from(bias_values)
    return module
