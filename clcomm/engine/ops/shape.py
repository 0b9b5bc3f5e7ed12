"""Reshape, flatten and transpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.types import dimension_of, moved
from clcomm.engine.tensor import Shape, Tensor, copy_into, empty, float_tensor, wrap
from clcomm.engine.view import NEVER, Block, View, block_of, reshaped, root_of, viewed, whole


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

    is_linear = True
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
    first, last = [dimension_of("flatten", x.shape or (1,), dim) for dim in (start_dim, end_dim)]
    if first > last:
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


def squeeze(x: Tensor, axis: int | None = None) -> Tensor:
    """Return x without its dimensions of size 1, or without one where it has that size; shares memory."""
    if axis is None:
        return _reshaped(x, tuple([n for n in x.shape if n != 1]))
    at = dimension_of("squeeze", x.shape, axis)
    return _reshaped(x, (*x.shape[:at], *x.shape[at + 1 :]) if x.shape[at] == 1 else x.shape)


def unsqueeze(x: Tensor, axis: int) -> Tensor:
    """Return x with a dimension of size 1 at `axis`; shares memory."""
    at = dimension_of("unsqueeze", (*x.shape, 1), axis)
    return _reshaped(x, (*x.shape[:at], 1, *x.shape[at:]))


def swap_dimensions(x: Tensor, first: int, second: int) -> Tensor:
    """Return x with two dimensions swapped; x: float32 of any shape."""
    order = list(range(x.ndim))
    one, other = [dimension_of("transpose", x.shape, axis) for axis in (first, second)]
    order[one], order[other] = other, one
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


# --- Parts of tensors at any strides, copied; and the operation that takes one, which brings a view up to date. ---


def part_from(shape: Shape, starts: Sequence[int], steps: Sequence[int] | None = None) -> Block:
    """Return the part of a tensor of `shape` from `starts` on, with every `steps`-th element."""
    strides = whole(shape).strides
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return Block(first, strides if steps is None else tuple(map(math.prod, zip(steps, strides, strict=True))))


@lru_cache(maxsize=1024)
def _plan(sizes: Shape, out: tuple[int, ...], x: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Return sizes, strides of out and strides of x, dimensions merged where possible, and their number."""
    merged: list[list[int]] = []
    for size, out_stride, x_stride in zip(sizes, out, x, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == [out_stride * size, x_stride * size]:
            merged[-1] = [merged[-1][0] * size, out_stride, x_stride]
        else:
            merged.append([size, out_stride, x_stride])
    plan = np.array(merged or [[1, 1, 1]], np.int32)
    return np.ascontiguousarray(plan.T).reshape(-1), len(plan)


@lru_cache(maxsize=2048)
def _reach(sizes: Shape, strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of elements that a part spans before its first one, and behind it."""
    ends = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
    return -sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends)


def copy_part(sizes: Shape, out: Tensor, to: Block, x: Tensor, part: Block) -> None:
    """Queue a copy of a part of x to a part of out, both of `sizes`; ArgumentError for one that leaves its tensor."""
    if 0 in sizes:
        return
    for tensor, block in ((out, to), (x, part)):
        before, behind = _reach(sizes, block.strides)
        if block.first < before or block.first + behind >= tensor.numel():
            raise ArgumentError(f"copy: expected a part within {tensor.shape}, got one of {sizes} at {block}")
    device = x.device
    plan, dims = _plan(sizes, to.strides, part.strides)
    buffer = device.keep(("block", sizes, to.strides, part.strides), lambda: plan)
    inner = int(plan[dims - 1])
    rows = math.prod(sizes) // inner
    grid = device.row_grid(rows, inner) if device.is_cpu else device.grid(rows * inner)
    kernel = device.kernel("shape", "copy_block")
    device.launch(kernel, *grid, out, x, buffer, dims, to.first, part.first, rows, inner)


def fill(x: Tensor, value: float) -> None:
    x.device.launch(x.device.kernel("elementwise", "fill"), *x.device.grid(x.numel()), x.buffer, value, x.numel())


class PartOp(Op):
    """The elements of x at `block`, in `shape`: x's memory if these are all of them in their order, else a copy."""

    takes_none = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, block: Block, shape: Shape) -> Tensor:
        ctx.block = block
        if ctx.needs[0]:
            require_apart(shape, block)
        if math.prod(shape) == x.numel() and block == whole(shape):
            return x.alias(shape)
        out = empty(x.device, shape, x.dtype)
        copy_part(shape, out, whole(shape), x, block)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.out(0)
        fill(dx, 0.0)
        copy_part(grad.shape, dx, ctx.block, grad, whole(grad.shape))
        return (dx,)


def require_apart(shape: Shape, block: Block) -> None:
    """Raise ArgumentError for a view that has an element in several places, as that of `expand`."""
    reach = 0
    for stride, size in sorted(zip(map(abs, block.strides), shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ArgumentError(
                f"in place: expected a tensor whose elements are each in one place, got a view of shape {shape} and "
                f"strides {block.strides}, as of expand(); use clone() before"
            )
        reach += (size - 1) * stride


taken_again = PartOp.apply
