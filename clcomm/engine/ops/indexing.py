"""Elements of a tensor by their indices along a dimension: gather, and index_select of whole slices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.blocks import take
from clcomm.engine.tensor import INT32, Tensor, empty, float_tensor
from clcomm.errors import ArgumentError


class GatherOp(Op):
    """x's elements, or slices, at indices along `axis`; backward adds the gradients of equal indices in order."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, axis: int, index: Tensor, each: bool) -> Tensor:
        device, shape, count = x.device, x.shape, index.shape[axis] if each else index.size
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        y = empty(device, (*shape[:axis], count, *shape[axis + 1 :]))
        ctx.index, ctx.sizes = index, (int(each), shape[axis], outer, count, inner)
        device.launch(device.kernel("gather_elements", "gather"), *device.grid(y.size), y, x, index, *ctx.sizes)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, (_, _, outer, _, inner) = ctx.out(0), ctx.sizes
        device = dx.device
        device.launch(device.kernel("elementwise", "fill"), *device.grid(dx.size), dx.buffer, 0.0, dx.size)
        kernel = device.kernel("gather_elements", "gather_grad")
        device.launch(kernel, *device.grid(outer * inner), dx, grad, ctx.index, *ctx.sizes)
        return (dx,)


def gather(x: Tensor, axis: int, index: Tensor | np.ndarray) -> Tensor:
    """Return a tensor of `index`'s shape with y[i, j, k] = x[i, index[i, j, k], k] for `axis` 1, as PyTorch's.

    Args:
        x: of any shape.
        axis: the dimension of x that the indices are of.
        index: as many dimensions as x, and no larger than x in the others than `axis`; an int32 tensor, or integers. Of
            a tensor an index outside the dimension gives NaN.

    Raises ArgumentError for other shapes, an axis that x does not have, and integers outside the dimension.
    """
    at = _axis("gather", x, axis)
    tensor = _indices("gather", x, at, index)
    fits = tensor.ndim == x.ndim and all(
        a <= b or d == at for d, (a, b) in enumerate(zip(tensor.shape, x.shape, strict=False))
    )
    if not fits:
        raise ArgumentError(
            f"gather: expected an index of {x.ndim} dimensions, none but {at} larger than of {x.shape}, got shape "
            f"{tensor.shape}"
        )
    part = tuple([slice(n if d != at else None) for d, n in enumerate(tensor.shape)])
    return GatherOp.apply(take(x, part), axis=at, index=tensor, each=True)


def index_select(x: Tensor, axis: int, index: Tensor | np.ndarray) -> Tensor:
    """Return x's slices along `axis` at the indices, as PyTorch's: y[i, j, k] = x[i, index[j], k] for `axis` 1.

    Args:
        x: of any shape.
        axis: the dimension of x that the indices are of.
        index: one dimension; an int32 tensor, or integers. Of a tensor an index outside the dimension gives NaN.

    Raises ArgumentError for other shapes, an axis that x does not have, and integers outside the dimension.
    """
    at = _axis("index_select", x, axis)
    tensor = _indices("index_select", x, at, index)
    if tensor.ndim != 1:
        raise ArgumentError(f"index_select: expected an index of one dimension, got shape {tensor.shape}")
    return GatherOp.apply(x, axis=at, index=tensor, each=False)


def _axis(name: str, x: Tensor, axis: int) -> int:
    float_tensor(name, x)
    if not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ArgumentError(f"{name}: axis {axis!r} does not fit a tensor of shape {x.shape}")
    return axis % x.ndim


def _indices(name: str, x: Tensor, axis: int, given: Any) -> Tensor:
    """Return indices as a tensor on x's device; an array's are checked."""
    if isinstance(given, Tensor):
        if given.dtype != INT32 or given.device is not x.device:
            raise ArgumentError(
                f"{name}: expected int32 indices on the device of x, got {given.dtype} on {given.device.name}"
            )
        return given
    array = np.asarray(given)
    if array.dtype.kind not in "iu" or not array.size:
        raise ArgumentError(f"{name}: expected integer indices, got {array.dtype} of shape {array.shape}")
    outside = (array < 0) | (array >= x.shape[axis])
    if outside.any():
        raise ArgumentError(f"{name}: expected indices from 0 to {x.shape[axis] - 1}, got {array[outside].flat[0]}")
    return Tensor(array.astype(np.int32), x.device)
