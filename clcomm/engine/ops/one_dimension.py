"""Convolution and pooling of one dimension: those of images of one row. N C L: sequences, channels, length."""

from __future__ import annotations

from typing import Any, NamedTuple

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.conv2d import conv2d, conv_transpose2d
from clcomm.engine.ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from clcomm.engine.ops.sampling import adaptive_max_pool2d
from clcomm.engine.ops.shape import squeeze, unsqueeze
from clcomm.engine.tensor import Tensor, float_tensor

Size = int | tuple[int]


class _Sizes(NamedTuple):
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


def one(name: str, value: Any, least: int = 1) -> int:
    """Return the whole number that is given, perhaps in a tuple; raises ArgumentError below `least`."""
    number = value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ArgumentError(f"{name}: expected a whole number from {least} up, got {value!r}")
    return number


def _row(name: str, x: Tensor) -> Tensor:
    if float_tensor(f"{name}: x", x).ndim != 3:
        raise ArgumentError(f"{name}: x: expected 3 dimensions (N, C, L), got shape {x.shape}")
    return unsqueeze(x, 2)


def _weight(name: str, weight: Tensor) -> Tensor:
    if float_tensor(f"{name}: weight", weight).ndim != 3:
        raise ArgumentError(f"{name}: weight: expected 3 dimensions, the last the kernel, got shape {weight.shape}")
    return unsqueeze(weight, 2)


def conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Size = 1, padding: Size | str = 0,
    dilation: Size = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the convolution of x [N, C, L] with weight [O, C / groups, kernel], plus bias [O]. See `conv2d`."""
    pads = padding if isinstance(padding, str) else (0, one("conv1d: padding", padding, 0))
    steps, apart = one("conv1d: stride", stride), (1, one("conv1d: dilation", dilation))
    y = conv2d(_row("conv1d", x), _weight("conv1d", weight), bias, steps, pads, apart, groups)
    return squeeze(y, 2)


def conv_transpose1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, groups: int = 1, dilation: Size = 1,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of x [N, C, L] with weight [C, O / groups, kernel]. See `conv_transpose2d`."""
    name = "conv_transpose1d"
    steps, apart = one(f"{name}: stride", stride), (1, one(f"{name}: dilation", dilation))
    pads, more = ((0, one(f"{name}: padding", each, 0)) for each in (padding, output_padding))
    return squeeze(conv_transpose2d(_row(name, x), _weight(name, weight), bias, steps, pads, more, groups, apart), 2)


def max_pool1d(
    x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: int = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """Return the maxima of the windows of x [N, C, L]. See `max_pool2d`."""
    sizes = _sizes("max_pool1d", kernel_size, stride, padding)
    return squeeze(max_pool2d(_row("max_pool1d", x), sizes.kernel, sizes.stride, sizes.padding, dilation, ceil_mode), 2)


def avg_pool1d(
    x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:  # fmt: skip
    """Return the means of the windows of x [N, C, L]. See `avg_pool2d`."""
    sizes = _sizes("avg_pool1d", kernel_size, stride, padding)
    return squeeze(
        avg_pool2d(_row("avg_pool1d", x), sizes.kernel, sizes.stride, sizes.padding, ceil_mode, count_include_pad), 2
    )


def _sizes(name: str, kernel: Size, stride: Size | None, padding: Size) -> _Sizes:
    steps = one(f"{name}: stride", kernel if stride is None else stride)
    return _Sizes((1, one(f"{name}: kernel_size", kernel)), (1, steps), (0, one(f"{name}: padding", padding, 0)))


def adaptive_avg_pool1d(x: Tensor, output_size: Size) -> Tensor:
    """Return the means of windows that cover x [N, C, L] in `output_size` parts. See `adaptive_avg_pool2d`."""
    size = one("adaptive_avg_pool1d: output_size", output_size)
    return squeeze(adaptive_avg_pool2d(_row("adaptive_avg_pool1d", x), (1, size)), 2)


def adaptive_max_pool1d(x: Tensor, output_size: Size) -> Tensor:
    """Return the maxima of windows that cover x [N, C, L] in `output_size` parts. See `adaptive_avg_pool2d`."""
    size = one("adaptive_max_pool1d: output_size", output_size)
    return squeeze(adaptive_max_pool2d(_row("adaptive_max_pool1d", x), (1, size)), 2)
