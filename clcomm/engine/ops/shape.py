"""Reshape, flatten and transpose."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.casts import moved
from clcomm.engine.ops.names import pytorch_names
from clcomm.engine.tensor import Shape, Tensor, copy_into, empty, float_tensor, wrap
from clcomm.engine.view import NEVER, Block, View, block_of, reshaped, root_of, viewed


class Reshape(Op):
    """The same memory in another shape."""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, shape: Shape) -> Tensor:
        return x.alias(shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (wrap(grad.device, grad.buffer, ctx.inputs[0].shape),)


class Clone(Op):
    """A copy."""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        out = empty(x.device, x.shape)
        copy_into(out, x)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad,)


class Transpose(Op):
    """A copy with the dimensions in the order of `axes`."""

    takes_none = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, axes: Shape) -> Tensor:
        ctx.axes = axes
        return permuted(x, axes, empty(x.device, tuple([x.shape[a] for a in axes])))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse = tuple(sorted(range(len(ctx.axes)), key=ctx.axes.__getitem__))
        return (permuted(grad, inverse, ctx.out(0)),)


@lru_cache(maxsize=1024)
def _transposition(shape: Shape, axes: Shape) -> tuple[np.ndarray, int]:
    """Return the sizes, then the strides in x, of the result's dimensions, merged where possible, and their number."""
    strides = [math.prod(shape[a + 1 :]) for a in range(len(shape))]
    sizes: list[int] = []
    steps: list[int] = []
    for a in axes:
        if shape[a] == 1:
            continue
        if sizes and steps[-1] == strides[a] * shape[a]:
            sizes[-1] *= shape[a]
            steps[-1] = strides[a]
        else:
            sizes.append(shape[a])
            steps.append(strides[a])
    return np.array([*sizes, *steps] or [1, 1], np.int32), max(len(sizes), 1)


def permuted(x: Tensor, axes: Shape, out: Tensor) -> Tensor:
    """Queue a copy of x to `out`, with its dimensions in the order of `axes`; return `out`."""
    device, size = x.device, x.numel()
    if not size:
        return out
    plan, dims = _transposition(x.shape, axes)
    if device.is_cpu and 2 <= dims <= 3 and plan[-2] == 1 and plan[-1] == plan[dims - 2]:
        rows, columns = int(plan[dims - 1]), int(plan[dims - 2])  # of x's matrices, one behind the other
        grid = device.row_grid(size // columns // 8 + 1, 8 * columns)
        kernel = device.kernel("shape", "transpose_matrices")
        device.launch(kernel, *grid, out, x, size // (rows * columns), rows, columns)
        return out
    buffer = device.keep(("transpose", x.shape, axes), lambda: plan)
    inner = int(plan[dims - 1])
    rows = size // inner
    grid = device.row_grid(rows, inner) if device.is_cpu else device.grid(size)
    device.launch(device.kernel("shape", "transpose"), *grid, out, x, buffer, dims, rows, inner)
    return out


def reshape(x: Tensor, shape: Shape) -> Tensor:
    """Return x in another shape, one dimension of which may be -1; shares memory.

    x: float32 or int32 of any shape.
    """
    known = math.prod([n for n in shape if n != -1])
    resolved = tuple([x.numel() // known if n == -1 and known > 0 else n for n in shape])
    if shape.count(-1) > 1 or min(resolved, default=1) < 0 or math.prod(resolved) != x.numel():
        raise ArgumentError(f"reshape: {x.numel()} elements of shape {x.shape} do not fit shape {tuple(shape)}")
    return _reshaped(x, resolved)


def _reshaped(x: Tensor, shape: Shape) -> Tensor:
    """Return x in another shape, a view; where PyTorch would copy, a copy."""
    block = x._source.block if type(x) is View else None
    if block is not None:
        strides = reshaped(x.shape, block.strides, shape)
        if strides is None:
            return _released(x, shape)
        block, x._source.is_alone = Block(block.first, strides), False
    taken = viewed(x, Reshape.apply(x, shape=shape), block)
    if block is not None:
        taken._source.is_alone = False
    return taken


def _released(x: Tensor, shape: Shape) -> Tensor:
    """Return a copy of a view: the buffer with its values, if it is the view's alone, which reads them anew if used."""
    copied = Reshape.apply(x if x._source.is_alone else clone(x), shape=shape)
    if x._source.is_alone:
        x._source.seen = NEVER
    return copied


def contiguous(x: Tensor) -> Tensor:
    """Return x itself, or a copy of a view whose elements PyTorch has apart."""
    return x if x.is_contiguous() else _released(x, x.shape)


def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Return x with the dimensions from `start_dim` to `end_dim` merged into one; shares memory.

    x: float32 or int32 of any shape.
    """
    first, last = [dim + x.ndim if dim < 0 else dim for dim in (start_dim, end_dim)]
    if not 0 <= first <= max(last, 0) < max(x.ndim, 1):
        raise ArgumentError(f"flatten: dimensions {start_dim} to {end_dim} do not fit a tensor of shape {x.shape}")
    if first == last and x.ndim:
        return x
    merged = math.prod(x.shape[first : last + 1])
    return _reshaped(x, (*x.shape[:first], merged, *x.shape[last + 1 :]))


def clone(x: Tensor) -> Tensor:
    """Return a copy through which gradients pass; x: of any type and shape."""
    return moved(x, Clone.apply)


def unshared(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that copies a result in the memory of the first argument, where PyTorch's has its own."""

    @wraps(function)
    def call(x: Tensor, *args: Any, **named: Any) -> Tensor:
        result = function(x, *args, **named)
        return clone(result) if root_of(result) is root_of(x) else result

    return call


@pytorch_names
def squeeze(x: Tensor, axis: int | None = None) -> Tensor:
    """Return x without its dimensions of size 1, or without one where it has that size; shares memory."""
    if axis is None:
        return _reshaped(x, tuple([n for n in x.shape if n != 1]))
    at = _dimension("squeeze", x.shape, axis)
    return _reshaped(x, (*x.shape[:at], *x.shape[at + 1 :]) if x.shape[at] == 1 else x.shape)


@pytorch_names
def unsqueeze(x: Tensor, axis: int) -> Tensor:
    """Return x with a dimension of size 1 at `axis`; shares memory."""
    at = _dimension("unsqueeze", (*x.shape, 1), axis)
    return _reshaped(x, (*x.shape[:at], 1, *x.shape[at:]))


def _dimension(name: str, shape: Shape, axis: int) -> int:
    if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        raise ArgumentError(f"{name}: expected a dimension from {-len(shape)} to {len(shape) - 1}, got {axis!r}")
    return axis % len(shape)


def swap_dimensions(x: Tensor, first: int, second: int) -> Tensor:
    """Return x with two dimensions swapped; x: float32 of any shape."""
    order = list(range(x.ndim))
    if not all(-x.ndim <= axis < x.ndim for axis in (first, second)):
        raise ArgumentError(f"transpose: expected two dimensions of shape {x.shape}, got {first} and {second}")
    order[first], order[second] = order[second], order[first]
    return transpose(x, tuple(order))


def transpose(x: Tensor, axes: Shape | None = None) -> Tensor:
    """Return x with its dimensions in the order of `axes`, reversed by default.

    x: of any type and shape; the result is a view with memory of its own.
    """
    if not isinstance(x, Tensor):
        float_tensor("transpose", x)
    order = tuple(range(x.ndim))[::-1] if axes is None else tuple([a + x.ndim if a < 0 else a for a in axes])
    if sorted(order) != list(range(x.ndim)):
        raise ArgumentError(f"transpose: axes {axes} are no order of the dimensions of shape {x.shape}")
    own, taken = block_of(x), moved(x, lambda own: Transpose.apply(own, axes=order))
    return viewed(x, taken, Block(own.first, tuple([own.strides[a] for a in order])))
