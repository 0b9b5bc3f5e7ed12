"""LeNet-5 with today's parts: 1-6-16 channels, then 400-120-84-10 for MNIST, 61,706 parameters."""

from __future__ import annotations

from clcomm.engine import ArgumentError, Conv2d, Device, Flatten, Generator, Linear, MaxPool2d, Module, ReLU, Tensor
from clcomm.engine import functional as F

LEAST_SIDE = 12  # of an image


class LeNet(Module):
    """Images [N, *in_shape] -> logits [N, classes]: twice 5x5 convolution, ReLU and 2x2 max-pool, then three layers.

    The sizes are those of the original, which has tanh, averages and partly connected channels in their place.
    Source: LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", 1998.

    Args:
        in_shape: (channels, height, width) of an image, at least 12 x 12; the first Linear's size follows from it.
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
        if len(in_shape) != 3 or min(in_shape[1:]) < LEAST_SIDE:
            raise ArgumentError(
                f"in_shape: expected (channels, height, width) of at least {LEAST_SIDE} x {LEAST_SIDE}, got {in_shape}"
            )
        rng = None if seed is None else Generator(seed)
        channels, height, width = in_shape
        self.conv1 = Conv2d(channels, 6, 5, padding=2, device=device, rng=rng)
        device = self.conv1.weight.device
        self.conv2 = Conv2d(6, 16, 5, device=device, rng=rng)
        self.fc1 = Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120, device=device, rng=rng)
        self.fc2 = Linear(120, 84, device=device, rng=rng)
        self.fc3 = Linear(84, classes, device=device, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv_relu_pool(x, self.conv1.weight, self.conv1.bias, padding=2)
        x = F.flatten(F.conv_relu_pool(x, self.conv2.weight, self.conv2.bias), 1)
        x = F.linear(x, self.fc1.weight, self.fc1.bias, relu=True)
        x = F.linear(x, self.fc2.weight, self.fc2.bias, relu=True)
        return self.fc3(x)

    def pipeline_layers(self) -> list[Module]:
        """Return modules that compute `forward` one after another, for the stages of a pipeline."""
        convolutions = [self.conv1, ReLU(), MaxPool2d(2), self.conv2, ReLU(), MaxPool2d(2)]
        return [*convolutions, Flatten(), self.fc1, ReLU(), self.fc2, ReLU(), self.fc3]
