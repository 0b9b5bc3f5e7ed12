"""Tensors joined and divided along dimensions, with PyTorch's names; of any type."""

from __future__ import annotations

from collections.abc import Sequence

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.arrangement import meshgrid, pad
from clcomm.engine.ops.blocks import concat, split, stack
from clcomm.engine.ops.reduce import broadcast_to
from clcomm.engine.ops.shape import reshape
from clcomm.engine.ops.types import broadcast_shape, dimension_of
from clcomm.engine.tensor import Tensor


def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along their second dimension, or along their only one."""
    at_least = [atleast_1d(x) for x in tensors]
    return concat(at_least, 0 if at_least and at_least[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along their first dimension, those of fewer than two as rows."""
    return concat([atleast_2d(x) for x in tensors], 0)


def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along a third dimension, which those of fewer have of size 1."""
    return concat([atleast_3d(x) for x in tensors], 2)


def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along their second dimension, those of fewer as columns."""
    return concat([x if x.ndim > 1 else reshape(x, (-1, 1)) for x in tensors], 1)


def tensor_split(x: Tensor, indices_or_sections: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Return a number of parts along a dimension, the first ones longer by 1, or those between the given indices.

    Raises ArgumentError where a part would be empty.
    """
    length, wanted = x.shape[dimension_of("tensor_split", x.shape, axis)], indices_or_sections
    if isinstance(wanted, int):
        sizes = [length // wanted + (n < length % wanted) for n in range(wanted)]
    else:
        ends = [*[n % length for n in wanted], length]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if not sizes or min(sizes) < 1:
        raise ArgumentError(f"tensor_split: expected parts of {length} elements, got {indices_or_sections!r}")
    return split(x, sizes, axis)


def block_diag(*tensors: Tensor) -> Tensor:
    """Return a matrix with float32 matrices, rows or numbers on its diagonal, and zeros."""
    blocks = [reshape(x, (1,) * (2 - x.ndim) + x.shape) for x in tensors]
    width, before, rows = sum(x.shape[1] for x in blocks), 0, []
    for x in blocks:
        rows.append(pad(x, [(0, 0), (before, width - before - x.shape[1])]))
        before += x.shape[1]
    return concat(rows, 0)


def broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors repeated to the shape to which they broadcast."""
    shape: tuple[int, ...] = ()
    for x in tensors:
        shape = broadcast_shape("broadcast_tensors", shape, x.shape)
    return tuple([x if x.shape == shape else broadcast_to(x, shape) for x in tensors])


def cartesian_prod(*tensors: Tensor) -> Tensor:
    """Return all choices of one element of each tensor of one dimension, as rows."""
    grids = meshgrid(*tensors)
    return stack([reshape(each, (-1,)) for each in grids], 1) if len(tensors) > 1 else grids[0]


def hsplit(x: Tensor, indices_or_sections: int | Sequence[int]) -> tuple[Tensor, ...]:
    """Return `tensor_split` along the second dimension, or along the only one."""
    return tensor_split(x, indices_or_sections, 0 if x.ndim == 1 else 1)


def vsplit(x: Tensor, indices_or_sections: int | Sequence[int]) -> tuple[Tensor, ...]:
    """Return `tensor_split` along the first dimension."""
    return tensor_split(x, indices_or_sections, 0)


def atleast_1d(x: Tensor) -> Tensor:
    """Return a tensor of one dimension or more."""
    return x if x.ndim else reshape(x, (1,))


def atleast_2d(x: Tensor) -> Tensor:
    """Return a tensor of two dimensions or more, new ones in front."""
    return x if x.ndim > 1 else reshape(x, (1, -1))


def atleast_3d(x: Tensor) -> Tensor:
    """Return a tensor of three dimensions or more: a vector's is the second, a matrix's the first two."""
    return x if x.ndim > 2 else reshape(atleast_2d(x), (*atleast_2d(x).shape, 1))
