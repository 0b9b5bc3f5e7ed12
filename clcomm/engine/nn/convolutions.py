"""Convolutional layers. N C H W: images, channels, height, width."""

from __future__ import annotations

from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.init import Generator, layer_parameters
from clcomm.engine.nn.layers import require_positive
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.one_dimension import Size, one
from clcomm.engine.ops.three_dimensions import whole_triple
from clcomm.engine.tensor import Tensor
from clcomm.errors import ArgumentError

Triple = int | tuple[int, int, int]


class Conv2d(Module):
    """x [N, in_channels, H, W] -> [N, out_channels, H', W']; initial values are PyTorch's.

    Args:
        kernel_size: one number for both directions, or (vertical, horizontal).
        stride: one number for both directions, or (vertical, horizontal).
        padding: likewise; or "same" or "valid".
        dilation: from tap to tap of the kernel: one number for both directions, or (vertical, horizontal).
        groups: divides input and output channels into so many groups.
        bias: whether the layer has a bias.
        device: where its parameters are; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        _check_sizes(in_channels, out_channels, min(height, width), groups)
        _check_mode(padding_mode)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight, self.bias = layer_parameters(
            (out_channels, in_channels // groups, height, width), bias, device, rng
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ConvTranspose2d(Module):
    """x [N, in_channels, H, W] -> [N, out_channels, H', W'], see F.conv_transpose2d; initial values are PyTorch's.

    Args:
        kernel_size: one number for both directions, or (vertical, horizontal).
        stride: one number for both directions, or two equal ones.
        padding, output_padding: one number for both directions, or (vertical, horizontal).
        groups: divides input and output channels into so many groups.
        bias: whether the layer has a bias.
        dilation: from tap to tap of the kernel: one number for both directions, or (vertical, horizontal).
        device: where its parameters are; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int] = 1,
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        _check_sizes(in_channels, out_channels, min(height, width), groups)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.groups, self.dilation = groups, dilation
        shape = in_channels, out_channels // groups, height, width
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight, self.bias = layer_parameters(shape, bias, device, rng, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class Conv1d(Module):
    """x [N, in_channels, L] -> [N, out_channels, L']; initial values are PyTorch's. Arguments are those of Conv2d."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        length = one("kernel_size", kernel_size)
        _check_sizes(in_channels, out_channels, length, groups)
        _check_mode(padding_mode)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight, self.bias = layer_parameters((out_channels, in_channels // groups, length), bias, device, rng)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ConvTranspose1d(Module):
    """x [N, in_channels, L] -> [N, out_channels, L'], as F.conv_transpose1d; arguments as of ConvTranspose2d."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Size = 1,
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        length = one("kernel_size", kernel_size)
        _check_sizes(in_channels, out_channels, length, groups)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.groups, self.dilation = groups, dilation
        shape = in_channels, out_channels // groups, length
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight, self.bias = layer_parameters(shape, bias, device, rng, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class Conv3d(Module):
    """x [N, in_channels, D, H, W] -> [N, out_channels, D', H', W'], as F.conv3d; arguments as of Conv2d, of three."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Triple,
        stride: Triple = 1,
        padding: Triple | str = 0,
        dilation: Triple = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        kernel = whole_triple("kernel_size", kernel_size, 1)
        _check_sizes(in_channels, out_channels, min(kernel), groups)
        _check_mode(padding_mode)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight, self.bias = layer_parameters((out_channels, in_channels // groups, *kernel), bias, device, rng)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv3d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ConvTranspose3d(Module):
    """x [N, in_channels, D, H, W] -> [N, out_channels, ...], as F.conv_transpose3d; arguments as of ConvTranspose2d."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Triple,
        stride: Triple = 1,
        padding: Triple = 0,
        output_padding: Triple = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Triple = 1,
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        kernel = whole_triple("kernel_size", kernel_size, 1)
        _check_sizes(in_channels, out_channels, min(kernel), groups)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.groups, self.dilation = groups, dilation
        shape = in_channels, out_channels // groups, *kernel
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight, self.bias = layer_parameters(shape, bias, device, rng, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose3d(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


def _check_mode(padding_mode: str) -> None:
    if padding_mode != "zeros":
        raise ArgumentError(f"padding_mode: expected 'zeros', as padding is zeros here, got {padding_mode!r}")


def _check_sizes(in_channels: int, out_channels: int, kernel_size: int, groups: int) -> None:
    require_positive(in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, groups=groups)
    if in_channels % groups or out_channels % groups:
        raise ArgumentError(f"groups: expected to divide {in_channels} and {out_channels} channels, got {groups}")
