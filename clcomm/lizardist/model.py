"""LizarDist's `engine.model`: its two models, with PyTorch layers of the same names; the one module with PyTorch."""

from __future__ import annotations

from clcomm.base.errors import needed

with needed("torch"):
    import torch

from torch.nn import Conv2d, Linear, ReLU, Sequential
from torch.nn.functional import max_pool2d


class MLP(torch.nn.Module):
    """A multilayer perceptron with two hidden layers of equal width.

    (N, input_dim) -> (N, output_dim)
    """

    def __init__(self, input_dim: int = 784, hidden_dim: int = 128, output_dim: int = 10):
        super().__init__()
        widths = Linear(input_dim, hidden_dim), Linear(hidden_dim, hidden_dim), Linear(hidden_dim, output_dim)
        self.net = Sequential(widths[0], ReLU(), widths[1], ReLU(), widths[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class ConvNet(torch.nn.Module):
    """Two convolutions, each followed by pooling, and two linear layers, for MNIST: 206,922 parameters.

    (N, 1, 28, 28) -> (N, 10)
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = Conv2d(1, 16, 3, padding=1), Conv2d(16, 32, 3, padding=1)
        self.fc1, self.fc2 = Linear(32 * 7 * 7, 128), Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution in (self.conv1, self.conv2):
            x = max_pool2d(convolution(x).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())
