"""Images of other sizes, made of other functions: interpolation, pixel shuffle, the largest elements of windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.indexing import index_select, kept
from clcomm.engine.ops.parts import fill
from clcomm.engine.ops.pool import max_pool2d, whole_pair
from clcomm.engine.ops.shape import reshape, transpose, unshared
from clcomm.engine.tensor import Tensor, empty, float_tensor

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
    if float_tensor("adaptive_max_pool2d: x", x).ndim != 4:
        raise ArgumentError(f"adaptive_max_pool2d: x: expected 4 dimensions (N, C, H, W), got shape {x.shape}")
    given = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    sizes: Any = tuple([n if own is None else own for own, n in zip(given, x.shape[2:], strict=False)])
    size, kernel = whole_pair("adaptive_max_pool2d: output_size", sizes, 1), []
    for axis, count in enumerate(size, 2):
        own, number = x.shape[axis], np.arange(count)
        first, behind = number * own // count, -(-(number + 1) * own // count)
        kernel.append(int((behind - first).max()))
        if kernel[-1] * count != own:  # windows of several lengths: their last element again has no gradient
            at = np.minimum(first[:, None] + np.arange(kernel[-1]), behind[:, None] - 1)
            x = index_select(x, axis, kept(x.device, at.reshape(-1)))
    return max_pool2d(x, (kernel[0], kernel[1]))
