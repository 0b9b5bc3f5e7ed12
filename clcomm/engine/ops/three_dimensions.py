"""Convolution and pooling of volumes, by those of images. N C D H W: volumes, channels, depth, rows, columns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.arrangement import padded, windows
from clcomm.engine.ops.blocks import take
from clcomm.engine.ops.conv2d import conv2d, conv_transpose2d
from clcomm.engine.ops.elementwise import add, mul
from clcomm.engine.ops.indexing import kept, spread
from clcomm.engine.ops.matmul import check_bias
from clcomm.engine.ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from clcomm.engine.ops.sampling import adaptive_max_pool2d
from clcomm.engine.ops.shape import reshape, transpose
from clcomm.engine.tensor import Tensor, float_tensor

Size = int | tuple[int, int, int]


def whole_triple(name: str, value: Any, least: int) -> tuple[int, int, int]:
    """Return (depth, rows, columns) from one whole number or three; raises ArgumentError below `least`."""
    triple = (value,) * 3 if isinstance(value, int) else value
    is_three = isinstance(triple, (tuple, list)) and len(triple) == 3
    if is_three and all(isinstance(n, int) and not isinstance(n, bool) and n >= least for n in triple):
        return triple[0], triple[1], triple[2]
    raise ArgumentError(f"{name}: expected a whole number from {least} up, or three of them, got {value!r}")


def _volumes(name: str, x: Tensor, weight: Tensor | None = None) -> None:
    if float_tensor(f"{name}: x", x).ndim != 5:
        raise ArgumentError(f"{name}: x: expected 5 dimensions (N, C, D, H, W), got shape {x.shape}")
    if weight is not None and float_tensor(f"{name}: weight", weight).ndim != 5:
        raise ArgumentError(f"{name}: weight: expected 5 dimensions, the last three the kernel, got {weight.shape}")


def conv3d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Size = 1, padding: Size | str = 0,
    dilation: Size = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the convolution of x [N, C, D, H, W] with weight [O, C / groups, depth, rows, columns], plus bias [O].

    The slices that a result's depth sees are channels of one image, which `conv2d` convolves; arguments are its, with
    three numbers for two. Raises ArgumentError for shapes that do not fit.
    """
    _volumes("conv3d", x, weight)
    steps, apart = whole_triple("conv3d: stride", stride, 1), whole_triple("conv3d: dilation", dilation, 1)
    if isinstance(padding, str):
        if padding not in ("same", "valid") or (padding == "same" and steps != (1, 1, 1)):
            raise ArgumentError(
                f"conv3d: padding: expected numbers, 'valid', or 'same' with a stride of 1, got {padding!r}, {stride!r}"
            )
        around = [gap * (n - 1) if padding == "same" else 0 for gap, n in zip(apart, weight.shape[2:], strict=True)]
        x = padded(x, [(0, 0), (0, 0), *((0, each % 2) for each in around)])
        padding = (around[0] // 2, around[1] // 2, around[2] // 2)
    before, *pads = whole_triple("conv3d: padding", padding, 0)
    outputs, channels, depth, *kernel = weight.shape
    seen = padded(x, [(0, 0), (0, 0), (before, before), (0, 0), (0, 0)])
    if apart[0] * (depth - 1) + 1 > seen.shape[2]:
        raise ArgumentError(f"conv3d: weight: expected a depth of at most {seen.shape[2]}, got {depth} by {apart[0]}")
    seen = transpose(windows(seen, 2, depth, steps[0], apart[0]), (0, 2, 1, 5, 3, 4))  # [N, results, C, depth, H, W]
    images = reshape(seen, (seen.shape[0] * seen.shape[1], -1, *seen.shape[4:]))
    taps = reshape(weight, (outputs, channels * depth, *kernel))
    y = conv2d(images, taps, bias, steps[1:], (pads[0], pads[1]), apart[1:], groups)
    return transpose(reshape(y, (*seen.shape[:2], *y.shape[1:])), (0, 2, 1, 3, 4))


def conv_transpose3d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, groups: int = 1, dilation: Size = 1,
) -> Tensor:  # fmt: skip
    """Return the transposed convolution of x [N, C, D, H, W] with weight [C, O / groups, depth, rows, columns].

    Arguments are those of `conv_transpose2d`, with three numbers for two.
    Raises ArgumentError for shapes that do not fit, or where nothing is left.
    """
    name = "conv_transpose3d"
    _volumes(name, x, weight)
    steps, apart = whole_triple(f"{name}: stride", stride, 1), whole_triple(f"{name}: dilation", dilation, 1)
    pads, more = (whole_triple(f"{name}: {what}", each, 0) for what, each in (
        ("padding", padding), ("output_padding", output_padding)))  # fmt: skip
    channels, outputs, depth, *kernel = weight.shape
    check_bias(name, bias, groups * outputs)
    length = (x.shape[2] - 1) * steps[0] + apart[0] * (depth - 1) + 1 + more[0]
    if length <= 2 * pads[0] or more[0] >= max(steps[0], apart[0]):
        raise ArgumentError(f"{name}: expected a depth to be left, with an output_padding below the stride, got {more}")
    images = reshape(transpose(x, (0, 2, 1, 3, 4)), (-1, x.shape[1], *x.shape[3:]))
    taps = reshape(weight, (channels, outputs * depth, *kernel))
    y = conv_transpose2d(images, taps, None, steps[1:], pads[1:], more[1:], groups, apart[1:])
    parts = reshape(y, (x.shape[0], x.shape[2], groups * outputs, depth, *y.shape[2:]))
    parts = transpose(parts, (0, 2, 1, 3, 4, 5))  # [N, O, D, depth, rows, columns]
    places = np.arange(x.shape[2])[:, None] * steps[0] + np.arange(depth) * apart[0]
    parts = reshape(parts, (*parts.shape[:2], places.size, *parts.shape[4:]))
    y = spread(parts, 2, kept(x.device, places.reshape(-1)), length)
    y = take(y, (slice(None), slice(None), slice(pads[0], length - pads[0])))
    return y if bias is None else add(y, reshape(bias, (bias.numel(), 1, 1, 1)))


def _planes_then_depth(x: Tensor, planes: Any, depth: Any) -> Tensor:
    """Return x [N, C, D, H, W] after a pooling of its rows and columns, and one of its depth as rows of images."""
    n, c, d = x.shape[:3]
    y = planes(reshape(x, (n, c * d, *x.shape[3:])))
    rows, columns = y.shape[2:]
    y = depth(reshape(y, (n, c, d, rows * columns)))
    return reshape(y, (n, c, y.shape[2], rows, columns))


def max_pool3d(
    x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: int = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """Return the maxima of the windows of x [N, C, D, H, W], of equal ones the first. See `max_pool2d`."""
    kernel, steps, pads = _sizes("max_pool3d", x, kernel_size, stride, padding)
    return _planes_then_depth(
        x,
        lambda y: max_pool2d(y, kernel[1:], steps[1:], pads[1:], dilation, ceil_mode),
        lambda y: max_pool2d(y, (kernel[0], 1), (steps[0], 1), (pads[0], 0), 1, ceil_mode),
    )


def avg_pool3d(
    x: Tensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the means of the windows of x [N, C, D, H, W]. See `avg_pool2d`."""
    kernel, steps, pads = _sizes("avg_pool3d", x, kernel_size, stride, padding)
    more = ceil_mode, count_include_pad, None if divisor_override is None else 1
    y = _planes_then_depth(
        x,
        lambda y: avg_pool2d(y, kernel[1:], steps[1:], pads[1:], *more),
        lambda y: avg_pool2d(y, (kernel[0], 1), (steps[0], 1), (pads[0], 0), *more),
    )
    return y if divisor_override is None else mul(y, 1.0 / divisor_override)


def _sizes(name: str, x: Tensor, kernel: Size, stride: Size | None, padding: Size) -> tuple[Any, Any, Any]:
    _volumes(name, x)
    steps = whole_triple(f"{name}: stride", kernel if stride is None else stride, 1)
    return whole_triple(f"{name}: kernel_size", kernel, 1), steps, whole_triple(f"{name}: padding", padding, 0)


def adaptive_avg_pool3d(x: Tensor, output_size: int | tuple[int | None, ...]) -> Tensor:
    """Return the means of windows that cover x [N, C, D, H, W] in `output_size` parts. See `adaptive_avg_pool2d`."""
    return _adaptive("adaptive_avg_pool3d", adaptive_avg_pool2d, x, output_size)


def adaptive_max_pool3d(x: Tensor, output_size: int | tuple[int | None, ...]) -> Tensor:
    """Return the maxima of windows that cover x [N, C, D, H, W] in `output_size` parts. See `adaptive_avg_pool2d`."""
    return _adaptive("adaptive_max_pool3d", adaptive_max_pool2d, x, output_size)


def _adaptive(name: str, function: Any, x: Tensor, output_size: Any) -> Tensor:
    _volumes(name, x)
    sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,) * 3
    own = [n if size is None else size for size, n in zip(sizes, x.shape[2:], strict=False)]
    depth, *plane = whole_triple(f"{name}: output_size", tuple(own) if len(sizes) == 3 else output_size, 1)
    return _planes_then_depth(x, lambda y: function(y, tuple(plane)), lambda y: function(y, (depth, math.prod(plane))))
