"""A multilayer perceptron: 784-128-128-10 for MNIST."""

from __future__ import annotations

import math

from clcomm.engine import Device, Flatten, Generator, Linear, Module, ReLU, Tensor
from clcomm.engine import functional as F


class MLP(Module):
    """Images [N, *in_shape] -> logits [N, classes], through two hidden layers with ReLU.

    Args:
        in_shape: the shape of an image; it is flattened.
        classes: the number of logits.
        hidden: the size of each hidden layer.
        device: the device of the parameters; None: the default device.
        seed: initial values are those of the same layers in PyTorch after `torch.manual_seed(seed)`; None: they come
            from the engine's own generator.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...] = (1, 28, 28),
        classes: int = 10,
        hidden: int = 128,
        *,
        device: Device | str | None = None,
        seed: int | None = None,
    ):
        rng = None if seed is None else Generator(seed)
        self.fc1 = Linear(math.prod(in_shape), hidden, device=device, rng=rng)
        device = self.fc1.weight.device
        self.fc2 = Linear(hidden, hidden, device=device, rng=rng)
        self.fc3 = Linear(hidden, classes, device=device, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        x = F.flatten(x, 1)
        x = F.linear(x, self.fc1.weight, self.fc1.bias, relu=True)
        x = F.linear(x, self.fc2.weight, self.fc2.bias, relu=True)
        return self.fc3(x)

    def pipeline_layers(self) -> list[Module]:
        """Return modules that compute `forward` one after another, for the stages of a pipeline."""
        return [Flatten(), self.fc1, ReLU(), self.fc2, ReLU(), self.fc3]
