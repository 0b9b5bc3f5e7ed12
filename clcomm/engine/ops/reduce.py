"""Sum and mean over all elements or over some dimensions, and argmax along the last one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.broadcasting import expand
from clcomm.engine.tensor import INT32, Shape, Tensor, empty, float_tensor, whole_rows, wrap
from clcomm.errors import ArgumentError

#: Elements of a row, and of a column, that one work unit sums; constants, so that results do not depend on the device.
ROW_BLOCK = 4096
_COLUMN_BLOCK = 256


class SumOp(Op):
    """scale * sum of x over `axes`, sorted dimensions; the result has `shape`."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, axes: Shape, shape: Shape, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.kept = tuple([1 if d in axes else n for d, n in enumerate(x.shape)])
        total = sum_over(x, axes, scale)
        return wrap(x.device, total.buffer, shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.inputs
        return (expand(wrap(grad.device, grad.buffer, ctx.kept), x.shape, ctx.scale, ctx.out(0)),)


def sum_over(x: Tensor, axes: Shape, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return scale * sum of x over the sorted dimensions `axes`, which stay as size 1; written to `out` if given."""
    if out is not None and out.size != math.prod([1 if d in axes else n for d, n in enumerate(x.shape)]):
        raise ArgumentError(f"sum: expected a result for {x.shape} summed over {axes}, got one of shape {out.shape}")
    runs = _adjacent_runs(axes)
    if not runs:
        return expand(x, x.shape, scale, out)
    for first, last in reversed(runs):
        outer, axis = math.prod(x.shape[:first]), math.prod(x.shape[first : last + 1])
        inner = math.prod(x.shape[last + 1 :])
        final = first == runs[0][0]
        shape = x.shape[:first] + (1,) * (last + 1 - first) + x.shape[last + 1 :]
        x = _sum_run(x, outer, axis, inner, shape, scale if final else 1.0, out if final else None)
    return x


def _adjacent_runs(axes: Shape) -> list[tuple[int, int]]:
    """Return (first, last) of each run of adjacent dimensions."""
    runs: list[tuple[int, int]] = []
    for axis in axes:
        if runs and runs[-1][1] == axis - 1:
            runs[-1] = (runs[-1][0], axis)
        else:
            runs.append((axis, axis))
    return runs


def _sum_run(x: Tensor, outer: int, axis: int, inner: int, shape: Shape, scale: float, out: Tensor | None) -> Tensor:
    """Return scale * x, seen as [outer, axis, inner], summed over `axis`, in `shape` or in `out` if given."""
    device = x.device
    block = ROW_BLOCK if inner == 1 else _COLUMN_BLOCK
    while True:
        blocks = -(-axis // block)
        if blocks > 1:
            target, factor = empty(device, (outer, blocks, inner)), 1.0
        else:
            target, factor = empty(device, shape) if out is None else out, scale
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


def sum(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the sum of x over the dimensions `axis` (all by default), which `keepdims` keeps with size 1.

    x: float32 of any shape; of all dimensions the result has the shape ().
    """
    axes, shape = reduced("sum", x, axis, keepdims)
    return SumOp.apply(x, axes=axes, shape=shape, scale=1.0)


def mean(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Return the mean of x over the dimensions `axis` (all by default), which `keepdims` keeps with size 1.

    x: float32 of any shape; of all dimensions the result has the shape ().
    """
    axes, shape = reduced("mean", x, axis, keepdims)
    return SumOp.apply(x, axes=axes, shape=shape, scale=1.0 / math.prod([x.shape[d] for d in axes]))


def reduced(name: str, x: Tensor, axis: int | Sequence[int] | None, keepdims: bool) -> tuple[Shape, Shape]:
    """Return the sorted dimensions that `axis` names, and the result's shape; ArgumentError where they do not fit."""
    float_tensor(name, x)
    given = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted({a + x.ndim if a < 0 else a for a in given}))
    if len(axes) != len(tuple(given)) or any(not 0 <= a < x.ndim for a in axes):
        raise ArgumentError(f"{name}: axis {axis} does not fit a tensor of shape {x.shape}")
    if keepdims:
        return axes, tuple([1 if d in axes else n for d, n in enumerate(x.shape)])
    return axes, tuple([n for d, n in enumerate(x.shape) if d not in axes])


def argmax(x: Tensor) -> Tensor:
    """Return the int32 index of the largest element along the last dimension, the first of equals.

    x: float32 [..., columns]; the result is int32 [...].
    """
    float_tensor("argmax", x)
    whole_rows("argmax", x)
    if not x.ndim:
        raise ArgumentError("argmax: expected a tensor with dimensions, got shape ()")
    device, columns = x.device, x.shape[-1]
    out = empty(device, x.shape[:-1], INT32)
    device.launch(device.kernel("reduce", "argmax_rows"), *device.grid(out.size), out, x, out.size, columns)
    return out
