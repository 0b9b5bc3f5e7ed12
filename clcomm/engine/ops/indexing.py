"""Elements by indices: rows of a table (embedding), gather along a dimension, and index_select of whole slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.device import Device
from clcomm.engine.ops import blocks
from clcomm.engine.ops.blocks import Index
from clcomm.engine.ops.elementwise import add
from clcomm.engine.ops.shape import fill, reshape
from clcomm.engine.ops.types import dimension_of, moved
from clcomm.engine.tensor import FLOAT32, INT32, Tensor, empty, float_tensor, wrap
from clcomm.engine.tensor_methods import note_of, require_below

OUTSIDE = "expected indices from 0 to {}, got {}"


def kept(device: Device, values: np.ndarray) -> Tensor:
    """Return constant values, int32 or float32, which are uploaded once."""
    own = np.ascontiguousarray(values, INT32 if values.dtype.kind in "iu" else np.float32)
    return wrap(device, device.keep(("values", own.dtype.str, own.tobytes()), lambda: own), own.shape, own.dtype)


class GatherOp(Op):
    """x's elements along `axis` at an index of each element of the result, or at one of each of its slices.

    Backward adds the gradients of equal indices in their order.
    """

    is_linear = True
    takes_none = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, axis: int, index: Tensor, each: bool) -> Tensor:
        device, shape, count = x.device, x.shape, index.shape[axis] if each else index.numel()
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        y = empty(device, (*shape[:axis], count, *shape[axis + 1 :]))
        ctx.axis, ctx.index, ctx.sizes = axis, index, (int(each), shape[axis], outer, count, inner)
        return _gathered(y, x, ctx)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_added(ctx.out(0), grad, ctx),)


class ScatterOp(Op):
    """Zeros, of `length` along `axis`, to which x is added as GatherOp's backward adds; its gradient is gathered."""

    is_linear = True
    takes_none = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, axis: int, index: Tensor, each: bool, length: int) -> Tensor:
        shape = x.shape
        outer, count, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        out = empty(x.device, (*shape[:axis], length, *shape[axis + 1 :]))
        ctx.axis, ctx.index, ctx.sizes = axis, index, (int(each), length, outer, count, inner)
        return _added(out, x, ctx)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_gathered(ctx.out(0), grad, ctx),)


def _gathered(out: Tensor, x: Tensor, ctx: Context) -> Tensor:
    device, kernel = out.device, out.device.kernel("gather_elements", "gather")
    device.launch(kernel, *device.grid(out.numel()), out, x, ctx.index, note_of(device), *ctx.sizes)
    return out


def _added(out: Tensor, x: Tensor, ctx: Context) -> Tensor:
    """Queue zeros, to which the elements of x are added at their indices."""
    device, (_, _, outer, _, inner) = out.device, ctx.sizes
    fill(out, 0.0)
    kernel = device.kernel("gather_elements", "gather_grad")
    device.launch(kernel, *device.grid(outer * inner), out, x, ctx.index, *ctx.sizes)
    return out


def spread(x: Tensor, axis: int, index: Tensor, length: int) -> Tensor:
    """Return x's slices along `axis` added up at their indices, of which there may be equal ones, among `length`.

    The reverse of `index_select`; x: float32, index: int32 [x.shape[axis]], from 0 to below `length`.
    """
    return ScatterOp.apply(x, axis=axis, index=index, each=False, length=length)


def scatter_add(x: Tensor, axis: int, index: Tensor | np.ndarray, src: Tensor) -> Tensor:
    """Return x with src[i, j, k] added to the element [i, index[i, j, k], k] for `axis` 1, as PyTorch's.

    Args:
        x: float32 of any shape.
        axis: the dimension of x that the indices are of.
        index: as for `gather`; that of a tensor that an operation made is read to the host.
        src: float32 of as many dimensions, none smaller than the index's; what is outside it is not added.

    Raises ArgumentError for other shapes, and integers outside the dimension.
    """
    at = _axis("scatter_add", x, axis)
    tensor = _indices("scatter_add", x, at, index)
    sizes = tensor.shape
    fits = tensor.ndim == float_tensor("scatter_add: src", src).ndim == x.ndim and all(
        n <= other and (n <= own or d == at)
        for d, (n, other, own) in enumerate(zip(sizes, src.shape, x.shape, strict=False))
    )
    if not fits:
        raise ArgumentError(
            f"scatter_add: expected an index no larger than x, but in dimension {at}, and src, got shapes {sizes}, "
            f"{x.shape} and {src.shape}"
        )
    if not require_below(f"scatter_add: {OUTSIDE}", tensor, x.shape[at]):
        require_below(f"scatter_add: {OUTSIDE}", tensor.numpy(), x.shape[at])
    given = blocks.take(src, tuple([slice(n) for n in sizes]))
    added = ScatterOp.apply(given, axis=at, index=tensor, each=True, length=x.shape[at])
    if added.shape != x.shape:
        added = blocks.Pad.apply(added, starts=(0,) * x.ndim, shape=x.shape, value=0.0)
    return add(x, added)


def gather(x: Tensor, axis: int, index: Tensor | np.ndarray) -> Tensor:
    """Return a tensor of `index`'s shape with y[i, j, k] = x[i, index[i, j, k], k] for `axis` 1, as PyTorch's.

    Args:
        x: of any type and shape.
        axis: the dimension of x that the indices are of.
        index: as many dimensions as x, and no larger than x in the others than `axis`; an int32 tensor, or integers. Of
            a tensor an index outside the dimension gives NaN; where x is not float32 it is read to the host.

    Raises ArgumentError for other shapes, an axis that x does not have, and integers outside the dimension.
    """
    if isinstance(x, Tensor) and x.dtype != FLOAT32:
        return moved(x, lambda own: gather(own, axis, _known(index)))
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
    return GatherOp.apply(blocks.take(x, part), axis=at, index=tensor, each=True)


def index_select(x: Tensor, axis: int, index: Tensor | np.ndarray) -> Tensor:
    """Return x's slices along `axis` at the indices, as PyTorch's: y[i, j, k] = x[i, index[j], k] for `axis` 1.

    Args:
        x: of any type and shape.
        axis: the dimension of x that the indices are of.
        index: one dimension; an int32 tensor, or integers. Of a tensor an index outside the dimension gives NaN;
            where x is not float32 it is read to the host.

    Raises ArgumentError for other shapes, an axis that x does not have, and integers outside the dimension.
    """
    if isinstance(x, Tensor) and x.dtype != FLOAT32:
        return moved(x, lambda own: index_select(own, axis, _known(index)))
    at = _axis("index_select", x, axis)
    tensor = _indices("index_select", x, at, index)
    if tensor.ndim != 1:
        raise ArgumentError(f"index_select: expected an index of one dimension, got shape {tensor.shape}")
    return GatherOp.apply(x, axis=at, index=tensor, each=False)


def take(x: Tensor, index: Index | tuple[Index, ...] | Tensor | np.ndarray | Sequence[int]) -> Tensor:
    """Return x[index] as NumPy does, as a view: whole numbers, slices with any step, `...` and None.

    Arrays or tensors of indices, or of booleans, pick elements to a copy; they are read to the host.
    x: of any type and shape; the result has NumPy's shape.
    Raises ArgumentError for other indices, for one outside its dimension, and for too many.
    """
    given = parts_of(index)
    arrays = picks(given)
    if not arrays:
        return blocks.take(x, given)
    return _picked(x, given) if arrays == len(given) else _picked_apart(x, given)


def picks(parts: tuple[Any, ...]) -> int:
    """Return how many arrays or tensors of indices, or of booleans, are among an index's `parts_of`."""
    return sum(isinstance(each, (Tensor, np.ndarray, list, range)) for each in parts)


def parts_of(index: Any) -> tuple[Any, ...]:
    """Return an index for each dimension, as PyTorch: of lists in a list each is one, a tensor of one is a number."""
    if isinstance(index, list) and any(isinstance(each, (list, tuple, slice, Tensor, np.ndarray)) for each in index):
        index = tuple(index)
    return tuple([
        int(each.item()) if isinstance(each, Tensor) and not each.shape and each.dtype.kind == "i" else each
        for each in (index if isinstance(index, tuple) else (index,))
    ])  # fmt: skip


def places(x: Tensor, index: Any) -> np.ndarray:
    """Return the places in x's memory of the elements of x[index], in the result's shape.

    index: as for `take`; tensors are read to the host. As in PyTorch, and not in NumPy, whole numbers come before
    arrays: they do not decide where the arrays' dimensions are in the result.
    """
    given = [each.numpy() if isinstance(each, Tensor) else each for each in parts_of(index)]
    # Of booleans as many as they have dimensions.
    spans = [0 if each is None or each is ... else np.ndim(each) if _is_kind("b", each) else 1 for each in given]
    for at in [at for at, each in enumerate(given) if each is ...][:1]:
        given[at : at + 1] = [slice(None)] * (x.ndim - sum(spans))
        spans[at : at + 1] = [1] * (x.ndim - sum(spans))
    numbers = [np.ndim(each) == 0 and _is_kind("iu", each) for each in given]
    first: list[Any] = []
    for each, span, is_number in zip(given, spans, numbers, strict=True):
        first += [each] if is_number else [slice(None)] * span
    rest = tuple([each for each, is_number in zip(given, numbers, strict=True) if not is_number])
    try:
        chosen: np.ndarray = np.arange(x.numel(), dtype=np.int32).reshape(x.shape)[tuple(first)][rest]
    except (IndexError, ValueError) as error:
        raise ArgumentError(f"index: {error}") from None
    return chosen


def _is_kind(kinds: str, index: object) -> bool:
    return not isinstance(index, slice) and index is not None and np.asarray(index).dtype.kind in kinds


def _picked_apart(x: Tensor, given: tuple[object, ...]) -> Tensor:
    """Return the elements at arrays of indices of some dimensions, and parts of the others."""
    chosen = places(x, given)
    return reshape(moved(reshape(x, (-1,)), lambda own: index_select(own, 0, chosen.ravel())), chosen.shape)


def _picked(x: Tensor, given: tuple[object, ...]) -> Tensor:
    """Return the elements, or parts, at arrays of indices of the first dimensions, or where booleans of them are true.

    The indices are read to the host, as the result's shape may depend on them.
    """
    arrays = [np.asarray(each.numpy() if isinstance(each, Tensor) else each) for each in given]
    if len(arrays) == 1 and arrays[0].dtype.kind == "b":
        if not arrays[0].ndim:
            return _picked_apart(x, given)
        if arrays[0].shape != x.shape[: arrays[0].ndim]:
            raise ArgumentError(
                f"index: expected booleans of shape {x.shape}'s first dimensions, got {arrays[0].shape}"
            )
        arrays = list(np.nonzero(arrays[0]))
    if len(arrays) > x.ndim or any(each.dtype.kind not in "iu" for each in arrays):
        raise ArgumentError(
            f"index: expected integers for at most {x.ndim} dimensions, or one array of booleans, got {len(given)} "
            f"of {[str(each.dtype) for each in arrays]}"
        )
    sizes = x.shape[: len(arrays)]
    try:
        places = np.broadcast_arrays(*arrays)
    except ValueError:
        raise ArgumentError(f"index: shapes {[each.shape for each in arrays]} do not broadcast") from None
    for each, size in zip(places, sizes, strict=True):
        outside = each[(each < -size) | (each >= size)]
        if outside.size:
            raise ArgumentError(f"index: expected indices from {-size} to {size - 1}, got {outside.flat[0]}")
    flat = np.ravel_multi_index([each % size for each, size in zip(places, sizes, strict=True)], sizes)
    rest = x.shape[len(arrays) :]
    rows = reshape(x, (math.prod(sizes), *rest))
    return reshape(moved(rows, lambda own: index_select(own, 0, flat.ravel())), (*flat.shape, *rest))


def _known(index: Tensor | np.ndarray) -> np.ndarray:
    """Return indices as an array, which is checked: only floats have a value for an index outside a dimension."""
    return index.numpy() if isinstance(index, Tensor) else index


def _axis(name: str, x: Tensor, axis: int) -> int:
    return dimension_of(name, float_tensor(name, x).shape, axis)


def _indices(name: str, x: Tensor, axis: int, given: object) -> Tensor:
    """Return indices as a tensor on x's device; those that the host knows are checked."""
    if isinstance(given, Tensor):
        if given.dtype != INT32 or given.device is not x.device:
            raise ArgumentError(
                f"{name}: expected int32 indices on the device of x, got {given.dtype} on {given.device.name}"
            )
        require_below(f"{name}: {OUTSIDE}", given, x.shape[axis], scores=x)
        return given
    array = np.asarray(given)
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"{name}: expected integer indices, got {array.dtype} of shape {array.shape}")
    require_below(f"{name}: {OUTSIDE}", array, x.shape[axis])
    return Tensor(array.astype(np.int32), x.device)


class EmbeddingOp(Op):
    """table[indices]; backward adds the gradients of equal indices in their order."""

    @staticmethod
    def forward(ctx: Context, table: Tensor, *, indices: Tensor, padding: int) -> Tensor:
        device, (entries, columns), rows = table.device, table.shape, indices.numel()
        y = empty(device, (*indices.shape, columns))
        kernel = device.kernel("embedding", "embedding")
        device.launch(
            kernel, *device.row_grid(rows, columns), y, table, indices, note_of(device), entries, rows, columns
        )
        ctx.indices, ctx.padding = indices, padding
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (table,), indices, dtable = ctx.inputs, ctx.indices, ctx.out(0)
        device, (entries, columns) = table.device, table.shape
        fill(dtable, 0.0)
        grid = device.row_grid(columns, indices.numel()) if device.is_cpu else device.grid(columns)
        kernel = device.kernel("embedding", "embedding_grad")
        device.launch(kernel, *grid, dtable, grad, indices, entries, ctx.padding, indices.numel(), columns)
        return (dtable,)


def embedding(indices: Tensor | np.ndarray, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return the rows of a table [entries, columns] at `indices` (any shape): [*indices.shape, columns].

    Args:
        indices: an int32 tensor, or integers; one outside the table that only the device knows gives NaN.
        table: float32 [entries, columns].
        padding_idx: the row that gets no gradient; a negative one counts from the end.

    Raises ArgumentError for integers outside the table, and for a table of other dimensions.
    """
    if float_tensor("embedding: table", table).ndim != 2:
        raise ArgumentError(f"embedding: expected a table [entries, columns], got shape {table.shape}")
    entries = table.shape[0]
    if padding_idx is not None and not -entries <= padding_idx < entries:
        raise ArgumentError(f"embedding: expected padding_idx from {-entries} to {entries - 1}, got {padding_idx}")
    padding = -1 if padding_idx is None else padding_idx % entries
    return EmbeddingOp.apply(table, indices=_index_tensor(indices, table), padding=padding)


def _index_tensor(indices: object, table: Tensor) -> Tensor:
    if isinstance(indices, Tensor):
        if indices.dtype != INT32:
            raise ArgumentError(f"embedding: expected int32 indices, got {indices.dtype}")
        require_below(f"embedding: {OUTSIDE}", indices, table.shape[0], scores=table)
        return indices
    array = np.asarray(indices)
    if array.dtype.kind not in "iu" or not array.size:
        raise ArgumentError(f"embedding: expected integer indices, got {array.dtype} of shape {array.shape}")
    require_below(f"embedding: {OUTSIDE}", array, table.shape[0])
    return Tensor(array.astype(np.int32), table.device)
