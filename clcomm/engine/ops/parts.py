"""Parts of tensors at any strides, copied; and the operation that takes one, which brings a view up to date."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.tensor import Shape, Tensor, empty
from clcomm.engine.view import Block, whole


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
