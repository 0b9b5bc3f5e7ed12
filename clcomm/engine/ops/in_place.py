"""Operations in place: a tensor, or a part of it, gets other values, as all who have it see."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.grad_slot import Gradient
from clcomm.engine.modes import is_recording
from clcomm.engine.ops.comparisons import masked_fill, where
from clcomm.engine.ops.indexing import index_select, parts_of, picks, places, take
from clcomm.engine.ops.reduce import broadcast_to
from clcomm.engine.ops.shape import clone, copy_part, require_apart, reshape
from clcomm.engine.ops.types import to_float
from clcomm.engine.parameter import LazyParameter
from clcomm.engine.tensor import BOOL, FLOAT32, Shape, Tensor, constant, copy_into, empty, float_tensor
from clcomm.engine.view import Block, View, block_of, root_of, whole


def overwrite(x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """Give x the values of operation(x), and its place on the tape; return x.

    x: of any type; tensors that share its memory, as those of `reshape` and `detach` do, get the values too, and not
    the place. Operations that kept x for their backward raise an error there.

    Raises ArgumentError for a result of another shape or type, and for a leaf that needs a gradient outside of
    `no_grad`.
    """
    if isinstance(x, Tensor) and x.dtype != FLOAT32:
        result = operation(x)
        if result.dtype != x.dtype or result.shape != x.shape:
            given = f"{result.dtype} of shape {result.shape}"
            raise ArgumentError(f"in place: expected a result of {x.dtype} of shape {x.shape}, got {given}")
        x.copy_from(result.numpy())
        return x
    float_tensor("in place", x)
    if is_recording() and any(each._requires_grad and each._node is None for each in (x, _recorded_root(x))):
        raise ArgumentError(
            "in place: expected a tensor that is no leaf, or no_grad() around it, got a leaf that needs a gradient, or "
            "a view of one"
        )
    before = x.alias(x.shape)
    before._node, before._requires_grad, before.whole_columns = x._node, x._requires_grad, x.whole_columns
    result = operation(before)
    if result is before:
        return x
    if result.shape != x.shape:
        raise ArgumentError(f"in place: expected a result of shape {x.shape}, got {result.shape}")
    _keep(before, result)
    root = _recorded_root(x)
    if root is not x and is_recording() and (result._requires_grad or root._requires_grad):
        require_apart(x.shape, block_of(x))
        chosen = as_strided(np.arange(root.numel(), dtype=np.int32), block_of(x), x.shape)
        overwrite(root, lambda old: _replaced(old, chosen, result))
        return x
    write(x, result)
    if result._node is not None:
        x._node, x._requires_grad = result._node, True
    return x


def _recorded_root(x: Tensor) -> Tensor:
    """Return the tensor whose place on the tape a write to x changes."""
    return x._source.root if isinstance(x, View) and x._source.is_recorded else x


def as_strided(values: np.ndarray, block: Block, shape: Shape) -> np.ndarray:
    """Return the part of a tensor's values at a block, as an array on the same memory."""
    strides = [stride * values.itemsize for stride in block.strides]
    return np.lib.stride_tricks.as_strided(values.reshape(-1)[block.first :], shape, strides)


def write(x: Tensor, values: Tensor | np.ndarray) -> None:
    """Write values of x's shape to its memory, or to that of which it is a view; the tape stays as it is."""
    root, block = root_of(x), block_of(x)
    require_apart(x.shape, block)
    if not x.numel():
        return
    if isinstance(root, (LazyParameter, Gradient)) or x.dtype != FLOAT32:  # their memory is made where it is used
        whole_values = root.numpy().copy()
        as_strided(whole_values, block, x.shape)[...] = values.numpy() if isinstance(values, Tensor) else values
        root.copy_from(whole_values)
        return
    own = values if isinstance(values, Tensor) else Tensor(values, x.device)
    if x.numel() == root.numel() and block == whole(x.shape):
        copy_into(root, own)
    else:
        copy_part(x.shape, root, block, own, whole(x.shape))
    root.note_write()


def assign(x: Tensor, index: Any, value: object) -> None:
    """Give the elements x[index] other values, through which gradients pass.

    Args:
        x: of any type. Its whole memory is written, as by any operation in place.
        index: as for `take`. Of equal places the last one counts.
        value: a number, or a tensor that broadcasts to x[index]'s shape.

    Raises ArgumentError for a value of another type or shape, and what `overwrite` raises.
    """
    if not isinstance(value, (Real, Tensor)):
        raise ArgumentError(f"x[...] =: expected a number or a Tensor, got {type(value).__name__}")
    is_mask = isinstance(index, Tensor) and index.dtype == BOOL
    is_other = isinstance(value, Tensor) and value.dtype != x.dtype and not (is_mask and value.numel() == 1)
    if is_other and picks(parts_of(index)):
        raise ArgumentError(f"x[...] =: expected values of {x.dtype} at arrays of indices, got others")
    if x.dtype != FLOAT32:
        values = x.numpy().copy()
        values.reshape(-1)[places(x, index)] = value.numpy() if isinstance(value, Tensor) else value
        x.copy_from(values)
    elif index is Ellipsis and x._node is None and not getattr(value, "requires_grad", False):
        whole = to_float(value) if isinstance(value, Tensor) else constant(x.device, float(value))
        overwrite(x, lambda old: broadcast_to(whole, old.shape))
    elif is_mask and index.shape == x.shape and isinstance(value, Real):
        overwrite(x, lambda old: masked_fill(old, index, float(value)))
    else:
        chosen = places(x, index)
        # Also of nothing, as overwrite refuses leaves.
        overwrite(x, lambda old: _replaced(old, chosen, value) if chosen.size else old)


def _replaced(x: Tensor, chosen: np.ndarray, value: Tensor | Real) -> Tensor:
    """Return x with the elements of a value, or a number, at the chosen places."""
    sources = np.full(x.numel(), -1, np.int32)
    sources[chosen] = _numbered(chosen.shape, value)
    is_given = Tensor((sources >= 0).reshape(x.shape), x.device)
    if isinstance(value, Real):
        return masked_fill(x, is_given, float(value))
    given = index_select(reshape(to_float(value), (-1,)), 0, np.maximum(sources, 0))
    return where(is_given, reshape(given, x.shape), x)


def scatter(x: Tensor, axis: int, index: Tensor | np.ndarray, src: Tensor | float) -> Tensor:
    """Return x with src[i, j, k] in place of the element [i, index[i, j, k], k] for `axis` 1, as PyTorch's.

    Of equal indices the last one counts. The indices are read to the host, so that a step with them is not replayed.
    x: of any type; `src`: a number, or a tensor no smaller than the index, which `gather` describes.
    """
    at = index.numpy() if isinstance(index, Tensor) else np.asarray(index)
    if at.ndim != x.ndim or not -x.ndim <= axis < x.ndim or at.dtype.kind not in "iu":
        raise ArgumentError(
            f"scatter: expected integers of {x.ndim} dimensions for one of shape {x.shape}, got {at.dtype} of shape "
            f"{at.shape} for dimension {axis}"
        )
    if at.size and not 0 <= at.min() <= at.max() < x.shape[axis]:
        raise ArgumentError(f"scatter: expected indices from 0 to {x.shape[axis] - 1}, got {at.min()} to {at.max()}")
    each = [at if d == axis % x.ndim else own for d, own in enumerate(np.indices(at.shape, np.int32))]
    result = clone(x)
    assign(result, tuple(each), take(src, tuple(map(slice, at.shape))) if isinstance(src, Tensor) else src)
    return result


def _numbered(shape: Shape, value: Tensor | Real) -> np.ndarray:
    """Return for each element of the part the number of the element of the value that it gets."""
    if isinstance(value, Real):
        return np.zeros(shape, np.int32)
    numbers = np.arange(value.numel(), dtype=np.int32).reshape(value.shape)
    try:
        return np.broadcast_to(numbers, shape)
    except ValueError:
        raise ArgumentError(f"x[...] =: expected a value of shape {shape}, got {value.shape}") from None


def _keep(before: Tensor, result: Tensor) -> None:
    """Give the operation a copy of the values that it kept of its input, which are about to be overwritten."""
    node = result._node
    if node is None or all(kept is not before for kept in node.saved):
        return
    copied = empty(before.device, before.shape)
    copy_into(copied, before)
    node.saved = tuple([copied if kept is before else kept for kept in node.saved])
