"""Images put together from windows and sampled at any places, and norms over neighbours, with PyTorch's names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.activation import relu
from clcomm.engine.ops.arrangement import pad
from clcomm.engine.ops.batched_matmul import matmul
from clcomm.engine.ops.blocks import take
from clcomm.engine.ops.comparisons import logical_and, to_int
from clcomm.engine.ops.elementwise import add, div, mul, sub
from clcomm.engine.ops.functions import abs, clamp, pow, square
from clcomm.engine.ops.indexing import gather, index_select, kept, spread
from clcomm.engine.ops.pool import avg_pool2d, max_pool2d, size_of_parts, whole_pair
from clcomm.engine.ops.reduce import broadcast_to
from clcomm.engine.ops.rounding import floor, round, sign
from clcomm.engine.ops.shape import fill, reshape, transpose, unshared
from clcomm.engine.ops.types import to_float
from clcomm.engine.tensor import Tensor, empty, float_tensor

Pair = int | tuple[int, int]
_SIDES = tuple(itertools.product((0, 1), repeat=2))


def fold(
    x: Tensor, output_size: Pair, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1
) -> Tensor:
    """Return images [N, C, H, W] whose windows are added up from columns [N, C * kernel_h * kernel_w, windows].

    The reverse of `unfold`; sizes are one number, or (rows, columns). Raises ArgumentError for sizes that do not fit.
    """
    sizes, kernel, apart, steps = (
        whole_pair(f"fold: {name}", given, 1)
        for name, given in (("output_size", output_size), ("kernel_size", kernel_size), ("dilation", dilation),
                            ("stride", stride))
    )  # fmt: skip
    pads = whole_pair("fold: padding", padding, 0)
    whole = [n + 2 * p for n, p in zip(sizes, pads, strict=True)]
    along = [
        np.arange(k)[:, None] * d + np.arange((n - d * (k - 1) - 1) // s + 1) * s
        for n, k, d, s in zip(whole, kernel, apart, steps, strict=True)
    ]
    places = along[0][:, None, :, None] * whole[1] + along[1][None, :, None, :]
    windows, area = places[0, 0].size, kernel[0] * kernel[1]
    if float_tensor("fold", x).ndim != 3 or x.shape[1] % area or x.shape[2] != windows:
        raise ArgumentError(f"fold: expected [N, C * {area}, {windows}] for these sizes, got shape {x.shape}")
    channels = x.shape[1] // area
    line = reshape(x, (x.shape[0], channels, area * windows))
    y = spread(line, 2, kept(x.device, places.reshape(-1)), whole[0] * whole[1])
    inside = tuple([slice(p, p + n) for p, n in zip(pads, sizes, strict=True)])
    return take(reshape(y, (x.shape[0], channels, *whole)), (slice(None), slice(None), *inside))


def local_response_norm(x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """Return x / (k + alpha * the mean square of `size` channels around each)^beta; x: float32 [N, C, ...].

    Source: Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional networks", 2012.
    """
    if x.ndim < 3 or size < 1:
        raise ArgumentError(
            f"local_response_norm: expected x [N, C, ...] and a size from 1 up, got {x.shape} and {size}"
        )
    squares = reshape(square(x), (x.shape[0], 1, x.shape[1], -1))
    around = pad(squares, [(0, 0), (0, 0), (size // 2, (size - 1) // 2), (0, 0)])
    mean = reshape(avg_pool2d(around, (size, 1), 1), x.shape)
    return div(x, pow(add(mul(mean, float(alpha)), float(k)), float(beta)))


def lp_pool2d(
    x: Tensor, norm_type: float, kernel_size: Pair, stride: Pair | None = None, ceil_mode: bool = False
) -> Tensor:
    """Return (the sum of x^norm_type in each window of x [N, C, H, W])^(1 / norm_type)."""
    rows, columns = whole_pair("lp_pool2d: kernel_size", kernel_size, 1)
    mean = avg_pool2d(pow(x, float(norm_type)), (rows, columns), stride, 0, ceil_mode)
    return pow(mul(mul(sign(mean.detach()), relu(abs(mean))), float(rows * columns)), 1.0 / float(norm_type))


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """Return the places [N, H, W, 2], from -1 to 1, to which matrices [N, 2, 3] bring an image's elements.

    size: [N, C, H, W]. Source: Jaderberg et al., "Spatial transformer networks", 2015.
    """
    if theta.shape != (size[0], 2, 3) or len(size) != 4:
        raise ArgumentError(f"affine_grid: expected theta ({size[0]}, 2, 3) and 4 sizes, got {theta.shape} and {size}")
    rows, columns = ((np.arange(n) * 2 + 1) / n - 1 if not align_corners else np.linspace(-1, 1, n) for n in size[2:])
    grid = np.stack([*np.meshgrid(columns, rows), np.ones((size[2], size[3]))], -1).reshape(-1, 3).astype(np.float32)
    return reshape(matmul(kept(theta.device, grid), transpose(theta, (0, 2, 1))), (size[0], size[2], size[3], 2))


def grid_sample(
    x: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Tensor:
    """Return x [N, C, H, W] at places [N, rows, columns, 2], (x, y) from -1 to 1, as [N, C, rows, columns].

    Args:
        mode: "bilinear", or "nearest", through which no gradient of the grid passes.
        padding_mode: "zeros" outside of the image, or "border".
        align_corners: whether -1 and 1 are the centres of the corners' elements, or their edges.

    Raises ArgumentError for other modes and shapes.
    """
    if mode not in ("bilinear", "nearest") or padding_mode not in ("zeros", "border"):
        given = f"{mode!r} and {padding_mode!r}"
        raise ArgumentError(f"grid_sample: expected 'bilinear' or 'nearest', and 'zeros' or 'border', got {given}")
    if x.ndim != 4 or grid.ndim != 4 or grid.shape[0] != x.shape[0] or grid.shape[3] != 2:
        raise ArgumentError(
            f"grid_sample: expected [N, C, H, W] and [N, rows, columns, 2], got {x.shape}, {grid.shape}"
        )
    n, channels, *sizes = x.shape
    places = []
    for axis, length in enumerate(reversed(sizes)):
        at = reshape(take(grid, (..., axis)), (n, 1, -1))
        at = mul(add(at, 1.0), 0.5 * (length - 1)) if align_corners else sub(mul(add(at, 1.0), 0.5 * length), 0.5)
        places.append(clamp(at, 0.0, length - 1.0) if padding_mode == "border" else at)
    around = [floor(at.detach()) if mode == "bilinear" else round(at.detach()) for at in places]
    if mode == "nearest":
        total = _sampled(x, places, around, False)
    else:
        four = [[add(each, float(side)) for each, side in zip(around, sides, strict=True)] for sides in _SIDES]
        total = reduce(add, [_sampled(x, places, corner, True) for corner in four])
    return reshape(total, (n, channels, *grid.shape[1:3]))


def _sampled(x: Tensor, places: list[Tensor], corner: list[Tensor], is_linear: bool) -> Tensor:
    """Return x at corners, 0 outside of it, times their share of the places, as [N, C, rows * columns]."""
    (n, channels, height, width), shares = x.shape, []
    for at, each, length in zip(places, corner, (width, height), strict=True):
        inside = to_float(logical_and(each >= 0.0, each <= length - 1.0))
        shares.append(mul(sub(1.0, abs(sub(at, each))), inside) if is_linear else inside)
    column, row = (clamp(each, 0.0, length - 1.0) for each, length in zip(corner, (width, height), strict=True))
    index = add(mul(row, float(width)), column)
    picked = gather(reshape(x, (n, channels, -1)), 2, to_int(broadcast_to(index, (n, channels, index.shape[2]))))
    return mul(picked, mul(*shares))


# --- Images of other sizes, made of other functions: interpolation, pixel shuffle, the largest elements of windows. ---

_MODES = {"nearest": (3, 4, 5), "nearest-exact": (3, 4, 5), "linear": (3,), "bilinear": (4,), "trilinear": (5,)}


class Resample(Op):
    """Slices along `axis`, each the sum of two of x's slices times their weights."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, axis: int, places: Tensor, weights: Tensor) -> Tensor:
        shape, count = x.shape, places.numel() // 2
        ctx.taps, ctx.sizes = (
            (places, weights),
            (shape[axis], math.prod(shape[:axis]), count, math.prod(shape[axis + 1 :])),
        )
        y = empty(x.device, (*shape[:axis], count, *shape[axis + 1 :]))
        grid = (
            x.device.row_grid(ctx.sizes[1], y.numel() // ctx.sizes[1]) if x.device.is_cpu else x.device.grid(y.numel())
        )
        x.device.launch(x.device.kernel("resample", "resample"), *grid, y, x, *ctx.taps, *ctx.sizes)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, device, (_, outer, _, inner) = ctx.out(0), grad.device, ctx.sizes
        fill(dx, 0.0)
        grid = device.row_grid(outer, grad.numel() // outer) if device.is_cpu else device.grid(outer * inner)
        device.launch(device.kernel("resample", "resample_grad"), *grid, dx, grad, *ctx.taps, *ctx.sizes)
        return (dx,)


def interpolate(
    x: Tensor, size: int | tuple[int, ...] | None = None, scale_factor: float | tuple[float, ...] | None = None,
    mode: str = "nearest", align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return x [N, C, ...] in another size, as PyTorch's function.

    Args:
        x: float32 of 3 to 5 dimensions.
        size: of each dimension behind the channels, or one number for all.
        scale_factor: in its place: how many times x's size, rounded down.
        mode: "nearest", "nearest-exact", or "linear", "bilinear", "trilinear" for 3, 4 and 5 dimensions.
        align_corners: whether the corners' elements stay where they are; of the linear modes.
        recompute_scale_factor: take the scale from the rounded sizes.

    Raises ArgumentError for other modes, and unless one of `size` and `scale_factor` is given.
    """
    name, dims = "interpolate", float_tensor("interpolate: x", x).ndim - 2
    if mode not in _MODES or x.ndim not in _MODES[mode]:
        known = [each for each, fits in _MODES.items() if x.ndim in fits]
        raise ArgumentError(f"{name}: mode: expected one of {known} for {x.ndim} dimensions, got {mode!r}")
    if (size is None) == (scale_factor is None):
        raise ArgumentError(f"{name}: expected one of size and scale_factor, got {size!r} and {scale_factor!r}")
    if align_corners is not None and mode.startswith("nearest"):
        raise ArgumentError(f"{name}: align_corners: expected None for mode {mode!r}, got {align_corners!r}")
    given: Any = size if scale_factor is None else scale_factor
    each = tuple(given) if isinstance(given, (tuple, list)) else (given,) * dims
    if len(each) != dims or min(each) <= 0:
        raise ArgumentError(f"{name}: expected {dims} positive numbers, or one, got {given!r}")
    for axis, number in enumerate(each, 2):
        own = x.shape[axis]
        count = int(number) if scale_factor is None else math.floor(own * number)
        by_scale = scale_factor is not None and not recompute_scale_factor
        scale = 1.0 / number if by_scale else own / count
        x = _along(x, axis, count, scale, mode, bool(align_corners))
    return x


def _along(x: Tensor, axis: int, count: int, scale: float, mode: str, align_corners: bool) -> Tensor:
    own, places = x.shape[axis], np.arange(count, dtype=np.float32)
    if mode.startswith("nearest"):
        at = np.floor((places + np.float32(0.5 * (mode != "nearest"))) * np.float32(scale)).astype(np.int64)
        return index_select(x, axis, kept(x.device, np.minimum(at, own - 1)))
    if align_corners:
        source = places * np.float32((own - 1) / (count - 1) if count > 1 else 0.0)
    else:
        source = np.maximum((places + np.float32(0.5)) * np.float32(scale) - np.float32(0.5), 0)
    low = np.minimum(source.astype(np.int64), own - 1)
    share = source - low
    places = np.concatenate((low, np.minimum(low + 1, own - 1)))
    weights = np.concatenate((1 - share, share))
    return Resample.apply(x, axis=axis, places=kept(x.device, places), weights=kept(x.device, weights))


@unshared
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """Return x [N, C * r^2, H, W] as [N, C, H * r, W * r]. Source: Shi et al., 2016, "Real-time single image ...".

    Raises ArgumentError unless the square of the factor r divides the channels.
    """
    r = upscale_factor
    if float_tensor("pixel_shuffle", x).ndim != 4 or not isinstance(r, int) or r < 1 or x.shape[1] % r**2:
        raise ArgumentError(
            f"pixel_shuffle: expected x [N, C, H, W] with channels that {r!r} squared divides, got shape {x.shape}"
        )
    n, c, h, w = x.shape
    return reshape(transpose(reshape(x, (n, c // r**2, r, r, h, w)), (0, 1, 4, 2, 5, 3)), (n, c // r**2, h * r, w * r))


@unshared
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """Return x [N, C, H * r, W * r] as [N, C * r^2, H, W]; ArgumentError unless the factor r divides the sizes."""
    r = downscale_factor
    is_whole = isinstance(r, int) and r > 0 and float_tensor("pixel_unshuffle", x).ndim == 4
    if not is_whole or x.shape[2] % r or x.shape[3] % r:
        raise ArgumentError(
            f"pixel_unshuffle: expected x [N, C, H, W] with sizes that {r!r} divides, got shape {x.shape}"
        )
    n, c, h, w = (*x.shape[:2], x.shape[2] // r, x.shape[3] // r)
    return reshape(transpose(reshape(x, (n, c, h, r, w, r)), (0, 1, 3, 5, 2, 4)), (n, c * r * r, h, w))


def adaptive_max_pool2d(x: Tensor, output_size: int | tuple[int | None, int | None]) -> Tensor:
    """Return the largest elements of windows that cover x [N, C, H, W]; windows are those of `adaptive_avg_pool2d`."""
    size, kernel = size_of_parts("adaptive_max_pool2d", x, output_size), []
    for axis, count in enumerate(size, 2):
        own, number = x.shape[axis], np.arange(count)
        first, behind = number * own // count, -(-(number + 1) * own // count)
        kernel.append(int((behind - first).max()))
        if kernel[-1] * count != own:  # windows of several lengths: their last element again has no gradient
            at = np.minimum(first[:, None] + np.arange(kernel[-1]), behind[:, None] - 1)
            x = index_select(x, axis, kept(x.device, at.reshape(-1)))
    return max_pool2d(x, (kernel[0], kernel[1]))
