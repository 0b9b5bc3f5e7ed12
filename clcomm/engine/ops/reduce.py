"""Sums and means over all elements or over some dimensions, and the repeating of elements, their opposite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.shape import reshape
from clcomm.engine.ops.types import broadcast_axes, cast, expand, is_whole, moved, on_host, to_float
from clcomm.engine.tensor import BOOL, FLOAT32, INT32, Shape, Tensor, empty, float_tensor, wrap
from clcomm.engine.view import Block, block_of, viewed

#: Elements of a row, and of a column, that one work unit sums; constants, so that results do not depend on the device.
ROW_BLOCK = 4096
_COLUMN_BLOCK = 256
#: As many ones have an exact sum in float32.
_MOST_COUNTED = 1 << 24


class ExpandOp(Op):
    """x repeated along the dimensions in which `shape` is larger."""

    is_linear = True
    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, shape: Shape) -> Tensor:
        return expand(x, shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.inputs
        return (sum_over(grad, broadcast_axes(x.shape, grad.shape), 1.0, ctx.out(0)),)


def broadcast_to(x: Tensor, size: Sequence[int]) -> Tensor:
    """Return x repeated along dimensions of size 1 and new ones in front, as a view; -1 keeps a dimension's size.

    x: of any type and shape. Raises ArgumentError for a shape that it does not broadcast to.
    """
    if not isinstance(x, Tensor):
        float_tensor("expand", x)
    new, lead = tuple(size), len(tuple(size)) - x.ndim
    own = (1,) * lead + x.shape
    if lead >= 0:
        new = tuple([o if n == -1 and d >= lead else n for d, (n, o) in enumerate(zip(new, own, strict=True))])
    if lead < 0 or any(n < 0 or o not in (1, n) for n, o in zip(new, own, strict=True)):
        raise ArgumentError(f"expand: expected a shape to which {x.shape} broadcasts, got {tuple(size)}")
    if new == x.shape:
        return reshape(x, new)
    place, taken = block_of(x), moved(x, lambda own: ExpandOp.apply(own, shape=new))
    strides = [0 if o != n else stride for o, n, stride in zip(x.shape, new[lead:], place.strides, strict=True)]
    return viewed(x, taken, Block(place.first, (*(0,) * lead, *strides)))


class SumOp(Op):
    """The sum of x over `axes`, divided by `divisor`; sorted dimensions; the result has `shape`."""

    is_linear = True
    takes_none = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, axes: Shape, shape: Shape, divisor: float) -> Tensor:
        ctx.divisor = divisor
        ctx.kept = tuple([1 if d in axes else n for d, n in enumerate(x.shape)])
        total = sum_over(x, axes, divisor)
        return wrap(x.device, total.buffer, shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.inputs
        return (expand(wrap(grad.device, grad.buffer, ctx.kept), x.shape, ctx.divisor, ctx.out(0)),)


def sum_over(x: Tensor, axes: Shape, divisor: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return the sum of x over sorted dimensions, which stay as 1, divided by `divisor`; written to `out` if given."""
    if out is not None and out.numel() != math.prod([1 if d in axes else n for d, n in enumerate(x.shape)]):
        raise ArgumentError(f"sum: expected a result for {x.shape} summed over {axes}, got one of shape {out.shape}")
    runs = _adjacent_runs(axes)
    if 0 in x.shape:
        total = empty(x.device, tuple([1 if d in axes else n for d, n in enumerate(x.shape)])) if out is None else out
        x.device.launch(x.device.kernel("elementwise", "fill"), *x.device.grid(total.numel()), total.buffer,
                        0.0 / divisor, total.numel())  # fmt: skip
        return total
    if not runs:
        return expand(x, x.shape, divisor, out)
    for first, last in reversed(runs):
        outer, axis = math.prod(x.shape[:first]), math.prod(x.shape[first : last + 1])
        inner = math.prod(x.shape[last + 1 :])
        final = first == runs[0][0]
        shape = x.shape[:first] + (1,) * (last + 1 - first) + x.shape[last + 1 :]
        x = _sum_run(x, outer, axis, inner, shape, divisor if final else 1.0, out if final else None)
    return x


def affine(x: Tensor, scale: float, shift: float, out: Tensor | None = None) -> Tensor:
    """Queue out = scale * x + shift and return out."""
    device, size = x.device, x.numel()
    out = empty(device, x.shape) if out is None else out
    device.launch(device.kernel("elementwise", "affine"), *device.grid(size), out, x, scale, shift, size)
    return out


def folded(ctx: Context, index: int, grad: Tensor, sign: float = 1.0) -> Tensor:
    """Return a gradient of the result's shape, or with sign -1 the opposite, summed to the shape of input `index`."""
    shape = ctx.inputs[index].shape
    if grad.shape == shape:
        return grad if sign == 1.0 else affine(grad, sign, -0.0, ctx.out(index))
    return sum_over(grad, broadcast_axes(shape, grad.shape), sign, ctx.out(index))


def _adjacent_runs(axes: Shape) -> list[tuple[int, int]]:
    """Return (first, last) of each run of adjacent dimensions."""
    runs: list[tuple[int, int]] = []
    for axis in axes:
        if runs and runs[-1][1] == axis - 1:
            runs[-1] = (runs[-1][0], axis)
        else:
            runs.append((axis, axis))
    return runs


def _sum_run(x: Tensor, outer: int, axis: int, inner: int, shape: Shape, divisor: float, out: Tensor | None) -> Tensor:
    """Return x / divisor, seen as [outer, axis, inner], summed over `axis`, in `shape` or in `out` if given."""
    device = x.device
    block = ROW_BLOCK if inner == 1 else _COLUMN_BLOCK
    while True:
        blocks = -(-axis // block)
        if blocks > 1:
            target, factor = empty(device, (outer, blocks, inner)), 1.0
        else:
            target, factor = empty(device, shape) if out is None else out, divisor
        if inner == 1:
            kernel, grid = device.kernel("reduce", "sum_rows"), device.row_grid(outer * blocks, min(axis, block))
            device.launch(kernel, *grid, target, x, outer, axis, block, blocks, factor)
        else:
            kernel = device.kernel("reduce", "sum_columns")
            grid = (
                device.row_grid(outer * blocks, min(axis, block) * inner)
                if device.is_cpu
                else device.grid(outer * blocks * inner)
            )
            device.launch(kernel, *grid, target, x, outer, axis, inner, block, blocks, factor)
        if blocks == 1:
            return target
        x, axis = target, blocks


def _of_type(name: str, x: Tensor, dtype: object) -> Tensor:
    if dtype is not None and dtype != FLOAT32:
        raise ArgumentError(f"{name}: dtype: expected float32 or None, got {dtype!r}")
    return x if dtype is None else to_float(x)


def sum(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False, *, dtype: object = None) -> Tensor:
    """Return the sum of x over the dimensions `axis` (all by default), which `keepdims` keeps with size 1.

    x: float32 of any shape, or booleans, whose number the result has, as int32; integers are added on the host. Of all
    dimensions the result has the shape (). dtype: None or float32, and then of any x.
    """
    x = _of_type("sum", x, dtype)
    if isinstance(x, Tensor) and x.dtype == BOOL and x.numel() <= _MOST_COUNTED:
        return cast(sum(to_float(x), axis, keepdims), "int_of_float", INT32)
    if is_whole(x):
        return on_host(np.sum, x, axis, keepdims)
    axes, shape = reduced("sum", x, axis, keepdims)
    return SumOp.apply(x, axes=axes, shape=shape, divisor=1.0)


def mean(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False, *, dtype: object = None) -> Tensor:
    """Return the mean of x over the dimensions `axis` (all by default), which `keepdims` keeps with size 1.

    x: float32 of any shape; of all dimensions the result has the shape (). dtype: None or float32, and then of any x.
    """
    x = _of_type("mean", x, dtype)
    axes, shape = reduced("mean", x, axis, keepdims)
    count = math.prod([x.shape[d] for d in axes])
    return SumOp.apply(x, axes=axes, shape=shape, divisor=count or math.nan)


def reduced(name: str, x: Tensor, axis: int | Sequence[int] | None, keepdims: bool) -> tuple[Shape, Shape]:
    """Return the sorted dimensions that `axis` names, and the result's shape; ArgumentError where they do not fit."""
    float_tensor(name, x)
    given = (axis,) if isinstance(axis, int) else tuple(axis or range(x.ndim))  # () is all, as PyTorch's
    axes = tuple(sorted({a + x.ndim if a < 0 else a for a in given}))
    if len(axes) != len(tuple(given)) or any(not 0 <= a < x.ndim for a in axes):
        raise ArgumentError(f"{name}: axis {axis} does not fit a tensor of shape {x.shape}")
    if keepdims:
        return axes, tuple([1 if d in axes else n for d, n in enumerate(x.shape)])
    return axes, tuple([n for d, n in enumerate(x.shape) if d not in axes])
