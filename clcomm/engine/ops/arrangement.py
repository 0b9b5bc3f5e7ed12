"""Elements in another arrangement: repeated, turned, shifted, and mirrored at the edges, with PyTorch's names."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops import blocks
from clcomm.engine.ops.indexing import index_select, kept, take
from clcomm.engine.ops.reduce import broadcast_to
from clcomm.engine.ops.shape import Transpose, reshape, transpose, unshared
from clcomm.engine.ops.types import dimension_of, moved
from clcomm.engine.tensor import FLOAT32, Tensor, float_tensor
from clcomm.engine.view import Block, block_of, viewed


@unshared
def repeat(x: Tensor, *sizes: int | Sequence[int]) -> Tensor:
    """Return x as often as `sizes` say along each dimension, of which there may be more than x has, in front.

    x: of any type and shape. Raises ArgumentError for fewer numbers than dimensions.
    """
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    times = [operator.index(n) for n in given]  # type: ignore[arg-type]
    if len(times) < x.ndim or min(times, default=1) < 1:
        raise ArgumentError(f"repeat: expected {x.ndim} or more numbers from 1 up, got {times}")
    shape = (1,) * (len(times) - x.ndim) + x.shape
    apart = [n for pair in zip([1] * len(shape), shape, strict=True) for n in pair]
    wanted = [n for pair in zip(times, shape, strict=True) for n in pair]
    whole = broadcast_to(reshape(x, tuple(apart)), tuple(wanted))
    return reshape(whole, tuple([n * size for n, size in zip(times, shape, strict=True)]))


@unshared
def flip(x: Tensor, *given: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """Return x with the order of its elements along the dimensions reversed; x: of any type and shape."""
    turned = _dimensions("flip", x, given if dims is None else (dims,))
    index: Any = tuple([slice(None, None, -1 if d in turned else None) for d in range(x.ndim)])
    return take(x, index)


@unshared
def roll(x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """Return x with its elements shifted along the dimensions, those that leave at one end entering at the other.

    x: of any type and shape; without `dims` it is shifted as if it had one dimension.
    """
    if dims is None:
        return reshape(roll(reshape(x, (-1,)), shifts, 0), x.shape)
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    result = x
    for d, shift in zip(_dimensions("roll", x, (dims,)), by, strict=True):
        by_less = operator.index(shift) % x.shape[d]
        result = moved(result, partial(blocks.Roll.apply, shift=by_less, axis=d)) if by_less else result
    return result


def unbind(x: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
    """Return the parts of x along a dimension, without it; x: of any type and shape."""
    (at,) = _dimensions("unbind", x, (axis,))
    before: list[Any] = [slice(None)] * at
    return tuple([take(x, (*before, number)) for number in range(x.shape[at])])


def narrow(x: Tensor, axis: int, start: int, length: int) -> Tensor:
    """Return `length` elements along a dimension, from `start` on; x: of any type and shape."""
    (at,) = _dimensions("narrow", x, (axis,))
    if not 0 <= start <= start + length <= x.shape[at]:
        raise ArgumentError(f"narrow: expected a part of {x.shape[at]}, got {length} elements from {start} on")
    before: list[Any] = [slice(None)] * at
    return take(x, (*before, slice(start, start + length)))


def windows(x: Tensor, axis: int, size: int, step: int, dilation: int = 1) -> Tensor:
    """Return the windows of `size` elements along a dimension, each `step` after the one before, as a last dimension.

    dilation: from an element of a window to its next. x: of any type and shape; PyTorch's method `unfold`.
    Raises ArgumentError for a window larger than the dimension.
    """
    (at,) = _dimensions("unfold", x, (axis,))
    reach = dilation * (size - 1) + 1
    if min(size, step, dilation) < 1 or reach > x.shape[at]:
        raise ArgumentError(f"unfold: expected a size and step from 1 up, within {x.shape[at]}, got {size} and {step}")
    count = (x.shape[at] - reach) // step + 1
    index = kept(x.device, (np.arange(count)[:, None] * step + np.arange(size) * dilation).reshape(-1))
    apart = moved(x, lambda own: index_select(own, at, index))
    apart = reshape(apart, (*x.shape[:at], count, size, *x.shape[at + 1 :]))
    order = [d for d in range(x.ndim + 1) if d != at + 1]
    place, taken = block_of(x), moved(apart, lambda own: Transpose.apply(own, axes=(*order, at + 1)))
    strides = [stride * step if d == at else stride for d, stride in enumerate(place.strides)]
    return viewed(x, taken, Block(place.first, (*strides, place.strides[at] * dilation)))


@unshared
def unfold(
    x: Tensor, kernel_size: int | tuple[int, int], dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0, stride: int | tuple[int, int] = 1,
) -> Tensor:  # fmt: skip
    """Return the windows of images x [N, C, H, W] as columns [N, C * kernel_h * kernel_w, windows], as PyTorch's.

    Sizes are one number, or (rows, columns). Raises ArgumentError for sizes that do not fit.
    """
    if float_tensor("unfold", x).ndim != 4:
        raise ArgumentError(f"unfold: expected 4 dimensions (N, C, H, W), got shape {x.shape}")
    sizes, apart, pads, steps = (
        (each, each) if isinstance(each, int) else tuple(each) for each in (kernel_size, dilation, padding, stride)
    )
    y = pad(x, [(0, 0), (0, 0), *((each, each) for each in pads)])
    for axis in (0, 1):
        y = windows(y, 2 + axis, sizes[axis], steps[axis], apart[axis])
    y = transpose(y, (0, 1, 4, 5, 2, 3))
    return reshape(y, (y.shape[0], math.prod(y.shape[1:4]), math.prod(y.shape[4:])))


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Return a[i] * b[j] as [n, m]; a: float32 [n], b: float32 [m]. Raises ArgumentError for other shapes."""
    if (a.ndim, b.ndim) != (1, 1):
        raise ArgumentError(f"outer: expected two tensors of one dimension, got shapes {a.shape} and {b.shape}")
    return reshape(a, (-1, 1)) * reshape(b, (1, -1))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of a[i] * b[i]; a, b: float32 [n]."""
    if a.ndim != 1 or a.shape != b.shape:
        raise ArgumentError(f"dot: expected two tensors of one dimension and equal length, got {a.shape} and {b.shape}")
    return (a * b).sum()


def meshgrid(*tensors: Tensor | Sequence[Tensor], indexing: str = "ij") -> tuple[Tensor, ...]:
    """Return the coordinates of a grid, as tensors of the grid's shape, of the coordinates along its dimensions.

    indexing: "ij", or "xy", where the first two dimensions are swapped.
    """
    given: list[Any] = list(tensors)
    given = list(given[0]) if len(given) == 1 and not isinstance(given[0], Tensor) else given
    if indexing not in ("ij", "xy"):
        raise ArgumentError(f"meshgrid: indexing: expected 'ij' or 'xy', got {indexing!r}")
    shape = tuple([each.numel() for each in given])
    grids = [
        broadcast_to(reshape(each, (1,) * d + (-1,) + (1,) * (len(shape) - d - 1)), shape)
        for d, each in enumerate(given)
    ]
    if indexing == "xy" and len(shape) > 1:
        grids = [transpose(each, (1, 0, *range(2, len(shape)))) for each in grids]
    return tuple(grids)


@unshared
def pad(
    x: Tensor, widths: Sequence[tuple[int, int]] | Sequence[int], mode: str | float = "constant", value: float = 0.0
) -> Tensor:
    """Return `padded`, a copy also where the widths are 0."""
    return padded(x, widths, mode, value)


def padded(
    x: Tensor, widths: Sequence[tuple[int, int]] | Sequence[int], mode: str | float = "constant", value: float = 0.0
) -> Tensor:
    """Return x with (before, after) elements of `value` around each dimension; ArgumentError for negative widths.

    A flat sequence of numbers is PyTorch's: before and after of the last dimension, then of the one before it. The mode
    is "constant", "reflect", "replicate" or "circular"; a number for it is the value.

    x: of any type and shape, integers are padded on the host; the result is before + after longer in each dimension.
    """
    if not isinstance(x, Tensor):
        float_tensor("pad", x)
    if isinstance(mode, (int, float)):
        mode, value = "constant", float(mode)
    if mode not in ("constant", "reflect", "replicate", "circular"):
        raise ArgumentError(f"pad: mode: expected 'constant', 'reflect', 'replicate' or 'circular', got {mode!r}")
    given: list[Any] = list(widths)
    if given and all(isinstance(each, (int, np.integer)) for each in given):
        around = list(zip(given[::2], given[1::2], strict=False))
        given = [(0, 0)] * (x.ndim - len(around)) + around[::-1] if len(given) % 2 == 0 else [given]
    pairs = [tuple(each) for each in given]
    if len(pairs) != x.ndim or any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
        raise ArgumentError(f"pad: expected {x.ndim} pairs (before, after) from 0 up, got {list(widths)}")
    shape = tuple([before + n + after for n, (before, after) in zip(x.shape, pairs, strict=True)])
    if shape == x.shape:
        return x
    if mode != "constant":
        return moved(x, lambda own: _pad_edges(own, pairs, str(mode)))
    if x.dtype != FLOAT32:  # few, and no arithmetic of floats is sure to keep a whole number's bits
        return Tensor(np.pad(x.numpy(), pairs, constant_values=value), x.device)
    return blocks.Pad.apply(x, starts=tuple([before for before, _ in pairs]), shape=shape, value=float(value))


def _pad_edges(x: Tensor, around: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Return x with (before, after) elements more in each dimension: its own, mirrored, repeated or from the other end.

    Args:
        x: float32.
        around: for each dimension.
        mode: "reflect", which does not repeat the edge, "replicate" or "circular".

    Raises ArgumentError for more than x has to mirror, or to take from the other end.
    """
    for d, (before, after) in enumerate(around):
        n = x.shape[d]
        most = {"reflect": n - 1, "circular": n, "replicate": math.inf}[mode]
        if max(before, after) > most:
            raise ArgumentError(f"pad: expected at most {most} elements around dimension {d}, got {(before, after)}")
        if before or after:
            x = index_select(x, d, _EDGES[mode](np.arange(-before, n + after), n))
    return x


_EDGES = {
    "reflect": lambda at, n: (n - 1) - np.abs((n - 1) - np.abs(at)),
    "replicate": lambda at, n: np.clip(at, 0, n - 1),
    "circular": lambda at, n: at % n,
}


def _dimensions(name: str, x: Tensor, given: tuple[int | Sequence[int], ...]) -> list[int]:
    dims: list[int] = list(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else list(given)  # type: ignore[arg-type]
    return [dimension_of(name, x.shape, d) for d in dims]
