"""A residual network for small images: ResNet-18 with a 3x3 first layer, 11,173,962 parameters for CIFAR-10."""

from __future__ import annotations

from collections.abc import Sequence

from clcomm.engine import (
    AdaptiveAvgPool2d,
    ArgumentError,
    BatchNorm2d,
    Conv2d,
    Device,
    Flatten,
    Generator,
    Linear,
    Module,
    ReLU,
    Sequential,
    Tensor,
)
from clcomm.engine import functional as F

Place = Device | str | None


class BasicBlock(Module):
    """x [N, channels, H, W] -> [N, width, H / stride, W / stride]: two 3x3 convolutions, and a way around them."""

    def __init__(self, channels: int, width: int, stride: int, device: Place, rng: Generator | None):
        self.conv1 = Conv2d(channels, width, 3, stride, 1, bias=False, device=device, rng=rng)
        self.bn1 = BatchNorm2d(width, device=device)
        self.conv2 = Conv2d(width, width, 3, 1, 1, bias=False, device=device, rng=rng)
        self.bn2 = BatchNorm2d(width, device=device)
        self.downsample: Module | None = None
        if stride != 1 or channels != width:
            shortcut = Conv2d(channels, width, 1, stride, bias=False, device=device, rng=rng)
            self.downsample = Sequential(shortcut, BatchNorm2d(width, device=device))

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + around)


class ResNet(Module):
    """Images [N, *in_shape] -> logits [N, classes]: four stages of basic blocks, each half the size of the one before.

    Names are those of torchvision's ResNet-18. Source: He, Zhang, Ren and Sun, "Deep Residual Learning for Image
    Recognition", 2016; the first layer is that of its networks for CIFAR-10.

    Args:
        in_shape: (channels, height, width) of an image.
        classes: the number of logits.
        blocks: the number of blocks in each stage.
        width: the channels of the first stage; each stage has twice as many as the one before.
        device: the device of the parameters; None: the default device.
        seed: initial values are those of the same layers in PyTorch after `torch.manual_seed(seed)`; None: they come
            from the engine's own generator.

    Raises ArgumentError for another `in_shape`.
    """

    def __init__(
        self,
        in_shape: tuple[int, int, int] = (3, 32, 32),
        classes: int = 10,
        blocks: Sequence[int] = (2, 2, 2, 2),
        width: int = 64,
        *,
        device: Place = None,
        seed: int | None = None,
    ):
        if len(in_shape) != 3 or min(in_shape) < 1:
            raise ArgumentError(f"in_shape: expected (channels, height, width), got {in_shape}")
        rng = None if seed is None else Generator(seed)
        self.conv1 = Conv2d(in_shape[0], width, 3, 1, 1, bias=False, device=device, rng=rng)
        device = self.conv1.weight.device
        self.bn1 = BatchNorm2d(width, device=device)
        channels = width
        for stage, count in enumerate(blocks):
            layers = []
            for number in range(count):
                stride = 2 if stage and not number else 1
                layers.append(BasicBlock(channels, width << stage, stride, device, rng))
                channels = width << stage
            setattr(self, f"layer{stage + 1}", Sequential(*layers))
        self.stages = len(blocks)
        self.avgpool = AdaptiveAvgPool2d(1)
        self.fc = Linear(channels, classes, device=device, rng=rng)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(F.flatten(self.avgpool(x), 1))

    def pipeline_layers(self) -> list[Module]:
        """Return modules that compute `forward` one after another, for the stages of a pipeline."""
        blocks = [block for stage in range(self.stages) for block in getattr(self, f"layer{stage + 1}")]
        return [self.conv1, self.bn1, ReLU(), *blocks, self.avgpool, Flatten(), self.fc]
