"""A small convolutional network: 1-16-32 channels, then 1568-128-10 for MNIST, 206,922 parameters."""

from __future__ import annotations

from clcomm.engine import (
    ArgumentError,
    Conv2d,
    Device,
    Flatten,
    Generator,
    Linear,
    MaxPool2d,
    Module,
    ReLU,
    Tensor,
)
from clcomm.engine import functional as F


class ConvNet(Module):
    """Images [N, *in_shape] -> logits [N, classes]: twice 3x3 convolution, ReLU and 2x2 max-pool, then two layers.

    Args:
        in_shape: (channels, height, width) of an image, at least 4 x 4; the first Linear's size follows from it.
        classes: the number of logits.
        device: the device of the parameters; None: the default device.
        seed: initial values are those of the same layers in PyTorch after `torch.manual_seed(seed)`; None: they come
            from the engine's own generator.

    Raises ArgumentError for another `in_shape`.
    """

    def __init__(
        self,
        in_shape: tuple[int, int, int] = (1, 28, 28),
        classes: int = 10,
        *,
        device: Device | str | None = None,
        seed: int | None = None,
    ):
        if len(in_shape) != 3 or min(in_shape[1:]) < 4:
            raise ArgumentError(f"in_shape: expected (channels, height, width) of at least 4 x 4, got {in_shape}")
        rng = None if seed is None else Generator(seed)
        channels, height, width = in_shape
        self.conv1 = Conv2d(channels, 16, 3, padding=1, device=device, rng=rng)
        device = self.conv1.weight.device
        self.conv2 = Conv2d(16, 32, 3, padding=1, device=device, rng=rng)
        self.fc1 = Linear(32 * (height // 4) * (width // 4), 128, device=device, rng=rng)
        self.fc2 = Linear(128, classes, device=device, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv_relu_pool(x, self.conv1.weight, self.conv1.bias, padding=1)
        x = F.conv_relu_pool(x, self.conv2.weight, self.conv2.bias, padding=1)
        x = F.flatten(x, 1)
        x = F.linear(x, self.fc1.weight, self.fc1.bias, relu=True)
        return self.fc2(x)

    def pipeline_layers(self) -> list[Module]:
        """Return modules that compute `forward` one after another, for the stages of a pipeline."""
        convolutions = [self.conv1, ReLU(), MaxPool2d(2), self.conv2, ReLU(), MaxPool2d(2)]
        return [*convolutions, Flatten(), self.fc1, ReLU(), self.fc2]
