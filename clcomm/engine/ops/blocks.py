"""Parts of tensors, and tensors of parts: indexing, concat, stack, split and pad."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.shape import Reshape, copy_part, fill, part_from, reshape
from clcomm.engine.ops.types import dimension_of, moved, of_any_type
from clcomm.engine.tensor import Shape, Tensor, empty, float_tensor
from clcomm.engine.view import Block, block_of, viewed, whole

Index = int | slice | EllipsisType | None


class SliceOp(Op):
    """The part of x that begins at `starts`, of `sizes`, with every `steps`-th element."""

    is_linear = True
    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, starts: Shape, steps: Shape, sizes: Shape) -> Tensor:
        out = empty(x.device, sizes)
        ctx.starts, ctx.steps, ctx.part = starts, steps, part_from(x.shape, starts, steps)
        copy_part(sizes, out, whole(sizes), x, ctx.part)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.out(0)
        if grad.numel() != dx.numel():
            fill(dx, 0.0)
        copy_part(grad.shape, dx, ctx.part, grad, whole(grad.shape))
        return (dx,)


class Concat(Op):
    """The inputs one after the other along `axis`; with `is_new` along one that they do not have."""

    takes_none = True

    @staticmethod
    def forward(ctx: Context, *inputs: Tensor, axis: int, is_new: bool = False) -> Tensor:
        ctx.axis, ctx.is_new = axis, is_new
        ctx.shapes = shapes = [_with_one(each.shape, axis) if is_new else each.shape for each in inputs]
        lengths = [shape[axis] for shape in shapes]
        ctx.starts = [sum(lengths[:number]) for number in range(len(inputs))]
        out = empty(inputs[0].device, (*shapes[0][:axis], sum(lengths), *shapes[0][axis + 1 :]))
        for each, shape, part in zip(inputs, shapes, Concat._parts(ctx, out.shape), strict=True):
            copy_part(shape, out, part, each, whole(shape))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for index, (shape, part) in enumerate(zip(ctx.shapes, Concat._parts(ctx, grad.shape), strict=True)):
            dx = ctx.out(index) if ctx.needs[index] else None
            if dx is not None:
                copy_part(shape, dx, whole(shape), grad, part)
            gradients.append(dx)
        return tuple(gradients)

    @staticmethod
    def _parts(ctx: Context, shape: Shape) -> list[Block]:
        return [part_from(shape, [start * (d == ctx.axis) for d in range(len(shape))]) for start in ctx.starts]


class Roll(Op):
    """x with `shift` elements of `axis` moved from its end to its beginning."""

    is_linear = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, shift: int, axis: int) -> Tensor:
        ctx.shift, ctx.axis = shift, axis
        return Roll._by(x, shift, axis, empty(x.device, x.shape))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (Roll._by(grad, grad.shape[ctx.axis] - ctx.shift, ctx.axis, ctx.out(0)),)

    @staticmethod
    def _by(x: Tensor, shift: int, axis: int, out: Tensor) -> Tensor:
        shape, stays = x.shape, x.shape[axis] - shift
        for length, to, start in ((stays, shift, 0), (shift, 0, stays)):
            parts = [part_from(shape, [at * (d == axis) for d in range(len(shape))]) for at in (to, start)]
            copy_part((*shape[:axis], length, *shape[axis + 1 :]), out, parts[0], x, parts[1])
        return out


class Pad(Op):
    """x within a tensor of `shape` that holds `value` elsewhere; x begins at `starts`."""

    is_linear = True
    takes_none = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, starts: Shape, shape: Shape, value: float) -> Tensor:
        out, ctx.part = empty(x.device, shape), part_from(shape, starts)
        ctx.starts, ctx.value = starts, value
        fill(out, value)
        copy_part(x.shape, out, ctx.part, x, whole(x.shape))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.out(0)
        copy_part(dx.shape, dx, whole(dx.shape), grad, ctx.part)
        return (dx,)


def take(x: Tensor, index: Index | tuple[Index, ...]) -> Tensor:
    """Return x[index] as NumPy does, as a view: whole numbers, slices with any step, `...` and None.

    x: of any type and shape; the result has NumPy's shape. With a step below 0, as PyTorch has none, it is a copy.
    Raises ArgumentError for other indices, for one outside its dimension, and for too many.
    """
    if not isinstance(x, Tensor):
        float_tensor("index", x)
    given = index if isinstance(index, tuple) else (index,)
    starts, steps, sizes, places = _resolve(x.shape, given)
    shape = tuple([1 if place is None else sizes[place] for place in places])
    if (starts, steps, sizes) == ((0,) * x.ndim, (1,) * x.ndim, x.shape):
        return reshape(x, shape)
    taken = moved(x, lambda own: SliceOp.apply(own, starts=starts, steps=steps, sizes=sizes))
    if shape != sizes:
        taken = Reshape.apply(taken, shape=shape)
    if min(steps) < 0:
        return taken
    own = block_of(x)
    strides = [stride * step for stride, step in zip(own.strides, steps, strict=True)]
    first = own.first + sum(start * stride for start, stride in zip(starts, own.strides, strict=True))
    return viewed(x, taken, Block(first, tuple([0 if place is None else strides[place] for place in places])))


def _resolve(shape: Shape, given: tuple[Index, ...]) -> tuple[Shape, Shape, Shape, list[int | None]]:
    """Return for each dimension the start, step and number of elements, and which one each of the result's is."""
    if given.count(Ellipsis) > 1:
        raise ArgumentError("index: expected at most one ..., got several")
    used = sum(each is not None and each is not Ellipsis for each in given)
    if used > len(shape):
        raise ArgumentError(f"index: expected at most {len(shape)} for a tensor of shape {shape}, got {used}")
    rest: tuple[Index, ...] = (slice(None),) * (len(shape) - used)
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    entries = (*given[:at], *rest, *given[at + 1 :])
    parts: list[tuple[int, int, int]] = []
    kept: list[int | None] = []
    for entry in entries:
        if entry is None:
            kept.append(None)
            continue
        start, step, size = _range(entry, shape[len(parts)], len(parts))
        parts.append((start, step, size))
        if isinstance(entry, slice):
            kept.append(len(parts) - 1)
    starts, steps, sizes = zip(*parts, strict=True) if parts else ((), (), ())
    return starts, steps, sizes, kept


def _range(entry: object, length: int, dimension: int) -> tuple[int, int, int]:
    if isinstance(entry, slice):
        try:
            start, stop, step = entry.indices(length)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"index: dimension {dimension}: {error}") from None
        return start, step, len(range(start, stop, step))
    if not isinstance(entry, (int, np.integer)) or isinstance(entry, bool):
        raise ArgumentError(f"index: expected a whole number, a slice, ... or None, got {type(entry).__name__}")
    if not -length <= entry < length:
        raise ArgumentError(f"index: expected {-length} to {length - 1} in dimension {dimension}, got {entry}")
    return int(entry) % length, 1, 1


@of_any_type
def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return tensors one after the other along `axis`; their other dimensions are equal. ArgumentError otherwise.

    tensors: of one type, at least one; the result's `axis` is as long as all of theirs. One of shape (0,) is left out.
    """
    own = _several("concat", tensors)
    own = [each for each in own if each.shape != (0,)] or own[:1]  # those of PyTorch's lists that begin empty
    first = own[0]
    axis = dimension_of("concat", first.shape, axis)
    for each in own:
        if each.ndim != first.ndim or each.shape[:axis] + each.shape[axis + 1 :] != _without(first.shape, axis):
            raise ArgumentError(f"concat: shapes {first.shape} and {each.shape} do not fit along axis {axis}")
    return Concat.apply(*own, axis=axis)


def _with_one(shape: Shape, axis: int) -> Shape:
    return *shape[:axis], 1, *shape[axis:]


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]


def _several(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    own = [float_tensor(name, each) for each in tensors]
    if not own:
        raise ArgumentError(f"{name}: expected at least one tensor, got none")
    if any(each.device is not own[0].device for each in own):
        raise ArgumentError(f"{name}: expected tensors on one device, got several")
    return own


@of_any_type
def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Return tensors of one shape along a new dimension `axis`; ArgumentError for several shapes.

    tensors: of one type, at least one; their number is the length of the result's `axis`.
    """
    own = _several("stack", tensors)
    shape = own[0].shape
    if any(each.shape != shape for each in own):
        raise ArgumentError(f"stack: expected one shape, got {sorted({each.shape for each in own})}")
    return Concat.apply(*own, axis=dimension_of("stack", (*shape, len(own)), axis), is_new=True)


def split(x: Tensor, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Return the parts of x along `axis`: of `sizes`, or all of one size but for a shorter last one.

    x: of any type and at least one dimension; the parts differ from its shape in `axis` alone.
    Raises ArgumentError where the sizes do not add up to the dimension.
    """
    if not isinstance(x, Tensor):
        float_tensor("split", x)
    axis = dimension_of("split", x.shape, axis)
    length = x.shape[axis]
    if isinstance(sizes, int):
        if sizes < 1:
            raise ArgumentError(f"split: expected a size of at least 1, got {sizes}")
        sizes = [min(sizes, length - start) for start in range(0, max(length, 1), sizes)]
    if min(sizes, default=0) < 0 or sum(sizes) != length:
        raise ArgumentError(f"split: expected sizes from 0 up whose sum is {length}, got {list(sizes)}")
    before: tuple[Index, ...] = (slice(None),) * axis
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple([take(x, (*before, slice(start, start + size))) for start, size in zip(starts, sizes, strict=True)])
