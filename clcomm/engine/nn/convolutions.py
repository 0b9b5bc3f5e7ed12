"""Convolutional layers. N C L: signals; N C H W: images; N C D H W: volumes."""

from __future__ import annotations

from typing import ClassVar

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.init import Generator, layer_parameters
from clcomm.engine.nn.layers import require_positive
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.one_dimension import one
from clcomm.engine.ops.three_dimensions import whole_triple
from clcomm.engine.tensor import Tensor

#: One number for all directions, or one for each.
Sizes = int | tuple[int, ...]
#: Of padding other than zeros; PyTorch's names.
_MODES = ("reflect", "replicate", "circular")


def _pair(name: str, value: Sizes) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else value


def _single(name: str, value: Sizes) -> tuple[int, ...]:
    return (one(name, value),)


def _triple(name: str, value: Sizes) -> tuple[int, ...]:
    return whole_triple(name, value, 1)


class _Convolution(Module):
    """A convolution by `_convolve`, whose kernel has the sizes that `_sizes` makes of an argument."""

    _sizes: ClassVar[staticmethod[[str, Sizes], tuple[int, ...]]]
    _convolve: ClassVar[staticmethod[..., Tensor]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        kernel = self._sizes("kernel_size", kernel_size)
        _check_sizes(in_channels, out_channels, min(kernel), groups)
        _check_mode(padding_mode, *_MODES)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.padding_mode = padding_mode
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight, self.bias = layer_parameters((out_channels, in_channels // groups, *kernel), bias, device, rng)

    def forward(self, x: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros" and (self._is_same() or not isinstance(padding, str)):
            x, padding = F.pad(x, self._around(), self.padding_mode), 0
        return self._convolve(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _is_same(self) -> bool:
        """Whether there are as many results as elements; with another stride the convolution refuses "same"."""
        return self.padding == "same" and set(self._sizes("stride", self.stride)) == {1}

    def _around(self) -> list[int]:
        """Return how many elements come before and after, from the last dimension on; if uneven one more after."""
        kernel, given = self.weight.shape[2:], self.padding
        if isinstance(given, str):
            gaps = self._sizes("dilation", self.dilation)
            sums = [gap * (n - 1) for n, gap in zip(kernel, gaps, strict=True)]
        else:
            sums = [2 * n for n in ((given,) * len(kernel) if isinstance(given, int) else given)]
        return [n for each in reversed(sums) for n in (each // 2, each - each // 2)]


class _Transposed(Module):
    """A transposed convolution, likewise."""

    _sizes: ClassVar[staticmethod[[str, Sizes], tuple[int, ...]]]
    _convolve: ClassVar[staticmethod[..., Tensor]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        padding_mode: str = "zeros",
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        kernel = self._sizes("kernel_size", kernel_size)
        _check_sizes(in_channels, out_channels, min(kernel), groups)
        _check_mode(padding_mode)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.groups, self.dilation = groups, dilation
        shape = in_channels, out_channels // groups, *kernel
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight, self.bias = layer_parameters(shape, bias, device, rng, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self._convolve(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class Conv2d(_Convolution):
    """x [N, in_channels, H, W] -> [N, out_channels, H', W']; initial values are PyTorch's.

    Args:
        kernel_size: one number for both directions, or (vertical, horizontal).
        stride: one number for both directions, or (vertical, horizontal).
        padding: likewise; or "same" or "valid".
        dilation: from tap to tap of the kernel: one number for both directions, or (vertical, horizontal).
        groups: divides input and output channels into so many groups.
        bias: whether the layer has a bias.
        padding_mode: "zeros", or as of F.pad "reflect", "replicate" or "circular".
        device: where its parameters are; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    _sizes, _convolve = staticmethod(_pair), staticmethod(F.conv2d)


class ConvTranspose2d(_Transposed):
    """x [N, in_channels, H, W] -> [N, out_channels, H', W'], see F.conv_transpose2d; initial values are PyTorch's.

    Args:
        kernel_size: one number for both directions, or (vertical, horizontal).
        stride: one number for both directions, or (vertical, horizontal).
        padding, output_padding: one number for both directions, or (vertical, horizontal).
        groups: divides input and output channels into so many groups.
        bias: whether the layer has a bias.
        dilation: from tap to tap of the kernel: one number for both directions, or (vertical, horizontal).
        device: where its parameters are; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    _sizes, _convolve = staticmethod(_pair), staticmethod(F.conv_transpose2d)


class Conv1d(_Convolution):
    """x [N, in_channels, L] -> [N, out_channels, L']; initial values are PyTorch's. Arguments are those of Conv2d."""

    _sizes, _convolve = staticmethod(_single), staticmethod(F.conv1d)


class ConvTranspose1d(_Transposed):
    """x [N, in_channels, L] -> [N, out_channels, L'], as F.conv_transpose1d; arguments as of ConvTranspose2d."""

    _sizes, _convolve = staticmethod(_single), staticmethod(F.conv_transpose1d)


class Conv3d(_Convolution):
    """x [N, in_channels, D, H, W] -> [N, out_channels, D', H', W'], as F.conv3d; arguments as of Conv2d, of three."""

    _sizes, _convolve = staticmethod(_triple), staticmethod(F.conv3d)


class ConvTranspose3d(_Transposed):
    """x [N, in_channels, D, H, W] -> [N, out_channels, ...], as F.conv_transpose3d; arguments as of ConvTranspose2d."""

    _sizes, _convolve = staticmethod(_triple), staticmethod(F.conv_transpose3d)


def _check_mode(padding_mode: str, *others: str) -> None:
    if padding_mode not in ("zeros", *others):
        raise ArgumentError(
            f"padding_mode: expected {' or '.join(map(repr, ('zeros', *others)))}, got {padding_mode!r}"
        )


def _check_sizes(in_channels: int, out_channels: int, kernel_size: int, groups: int) -> None:
    require_positive(in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, groups=groups)
    if in_channels % groups or out_channels % groups:
        raise ArgumentError(f"groups: expected to divide {in_channels} and {out_channels} channels, got {groups}")
