"""Elements picked, added or written by indices, and dimensions moved, with PyTorch's names."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.arrangement import flip, repeat
from clcomm.engine.ops.comparisons import masked_fill, where
from clcomm.engine.ops.elementwise import add, mul
from clcomm.engine.ops.indexing import _axis, gather, index_select, spread, take
from clcomm.engine.ops.reduce import broadcast_to
from clcomm.engine.ops.shape import reshape, swap_dimensions, transpose, unshared
from clcomm.engine.ops.types import broadcast_shape, dimension_of, moved
from clcomm.engine.tensor import Tensor, float_tensor


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """Return the elements where a mask is true, which broadcast, as one dimension; the mask is read to the host."""
    shape = broadcast_shape("masked_select", (1,), broadcast_shape("masked_select", x.shape, mask.shape))
    return take(broadcast_to(x, shape), broadcast_to(mask, shape))


def select(x: Tensor, axis: int, index: int) -> Tensor:
    """Return the part of x at an index of a dimension, without it; x: of any type and shape."""
    before: list[Any] = [slice(None)] * dimension_of("select", x.shape, axis)
    return take(x, (*before, index))


def take_along_dim(x: Tensor, indices: Tensor | np.ndarray, axis: int | None = None) -> Tensor:
    """Return the elements at indices along a dimension, see `gather`; without one of x as a single dimension."""
    if axis is None:
        return gather(reshape(x, (-1,)), 0, reshape(indices, (-1,)))  # type: ignore[arg-type]
    at = dimension_of("take_along_dim", x.shape, axis)
    if [n for d, n in enumerate(indices.shape) if d != at] != [n for d, n in enumerate(x.shape) if d != at]:
        raise ArgumentError(f"take_along_dim: expected sizes as of {x.shape} but along {axis}, got {indices.shape}")
    return gather(x, axis, indices)


def index_add(x: Tensor, axis: int, index: Tensor | np.ndarray, source: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Return x with alpha * the source's slices added to its own at the indices of a dimension, in their order.

    x, source: float32, of equal size but along `axis`, where the source has one slice for each index; index: int32.
    """
    at = axis % float_tensor("index_add", x).ndim
    own = index if isinstance(index, Tensor) else Tensor(np.asarray(index), x.device)
    known = own.numpy()
    if known.ndim != 1 or source.shape != (*x.shape[:at], known.size, *x.shape[at + 1 :]):
        raise ArgumentError(
            f"index_add: expected a slice of {x.shape} for each index, got shapes {own.shape} and {source.shape}"
        )
    if known.min() < 0 or known.max() >= x.shape[at]:
        raise ArgumentError(
            f"index_add: expected indices from 0 to {x.shape[at] - 1}, got {known.min()} to {known.max()}"
        )
    return add(x, spread(source if alpha == 1 else mul(source, float(alpha)), at, own, x.shape[at]))


def index_fill(x: Tensor, axis: int, index: Tensor | np.ndarray, value: float) -> Tensor:
    """Return x with a number in its slices at the indices of a dimension; x: float32."""
    at = _axis("index_fill", x, axis)
    chosen = np.zeros(x.shape[at], np.bool_)
    chosen[index.numpy() if isinstance(index, Tensor) else np.asarray(index)] = True
    return masked_fill(x, chosen.reshape(-1, *(1,) * (x.ndim - at - 1)), value)


def repeat_interleave(x: Tensor, repeats: int | Tensor, axis: int | None = None) -> Tensor:
    """Return each slice of a dimension several times, one number for all or one for each; without one each element.

    x: of any type and shape; a tensor of numbers is read to the host.
    """
    if axis is None:
        return repeat_interleave(reshape(x, (-1,)), repeats, 0)
    at = dimension_of("repeat_interleave", x.shape, axis)
    times = repeats.numpy() if isinstance(repeats, Tensor) else np.asarray(repeats)
    index = np.repeat(np.arange(x.shape[at]), times)
    if not index.size:
        raise ArgumentError(f"repeat_interleave: expected a number above 0 for {x.shape[at]} slices, got {repeats!r}")
    return moved(x, lambda own: index_select(own, at, index))


def movedim(x: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Return x with dimensions at other places, and the rest in their order; x: of any type and shape."""
    before, after = (
        [dimension_of("movedim", x.shape or (1,), d) for d in ([given] if isinstance(given, int) else given)]
        for given in (source, destination)
    )
    order = [d for d in range(x.ndim) if d not in before]
    for place, d in sorted(zip(after, before, strict=True)):
        order.insert(place, d)
    return transpose(x, tuple(order))


def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return x with a dimension divided into several, one of which may be -1; x: of any type and shape."""
    at = dimension_of("unflatten", x.shape, dim)
    before, after = x.shape[:at], x.shape[at + 1 :]
    whole = [operator.index(n) for n in sizes]
    if -1 in whole:
        whole[whole.index(-1)] = x.shape[at] // -int(np.prod(whole))
    return reshape(x, (*before, *whole, *after))


def tile(x: Tensor, *dims: int | Sequence[int]) -> Tensor:
    """Return x several times along its last dimensions, all of them as often as `repeat`; x: of any type and shape."""
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    return repeat(x, *(1,) * (x.ndim - len(given)), *given)


@unshared
def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Return x turned by k quarters from the first of two dimensions towards the second; x: of any type and shape."""
    first, second = [dimension_of("rot90", x.shape, d) for d in dims]
    if k % 4 == 2:
        return flip(x, first, second)
    if k % 4 == 0:
        return x
    return (
        swap_dimensions(flip(x, second), first, second)
        if k % 4 == 1
        else flip(swap_dimensions(x, first, second), second)
    )


def flipud(x: Tensor) -> Tensor:
    """Return x with its first dimension reversed; x: of any type."""
    return flip(x, 0)


def fliplr(x: Tensor) -> Tensor:
    """Return x with its second dimension reversed; x: of any type."""
    return flip(x, 1)


# -- on the host: their results' shapes, or integers, follow from values


def nonzero(x: Tensor, *, as_tuple: bool = False) -> Any:
    """Return `argwhere`, or with `as_tuple` the indices of each dimension."""
    return where(x) if as_tuple else argwhere(x)


def argwhere(x: Tensor) -> Tensor:
    """Return the indices of all elements that are not 0, [number, dimensions]; read to the host."""
    return Tensor(np.argwhere(x.numpy()), x.device)


def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return how often each whole number from 0 on is among the elements, or the sum of their weights; on the host."""
    counts = np.bincount(x.numpy(), None if weights is None else weights.numpy(), minlength)
    return Tensor(counts if weights is None else counts.astype(np.float32), x.device)


def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """Return the elements without repetition, sorted, and on demand each one's place and number; on the host."""
    found = np.unique(x.numpy(), return_inverse=True, return_counts=True)
    parts = [found[0], found[1].reshape(x.shape), found[2]]
    wanted = [
        Tensor(each, x.device)
        for each, is_asked in zip(parts, (True, return_inverse, return_counts), strict=True)
        if is_asked
    ]
    return wanted[0] if len(wanted) == 1 else tuple(wanted)


def searchsorted(sorted_sequence: Tensor, x: Tensor | float, *, right: bool = False) -> Tensor:
    """Return where values belong in a sorted tensor of one dimension, before equal ones or after them; on the host."""
    if sorted_sequence.ndim != 1:
        raise ArgumentError(f"searchsorted: expected a sequence of one dimension, got shape {sorted_sequence.shape}")
    places = np.searchsorted(
        sorted_sequence.numpy(), x.numpy() if isinstance(x, Tensor) else x, "right" if right else "left"
    )
    return Tensor(np.asarray(places), sorted_sequence.device)


def bucketize(x: Tensor, boundaries: Tensor, *, right: bool = False) -> Tensor:
    """Return the number of the interval between sorted boundaries that each element is in. See `searchsorted`."""
    return searchsorted(boundaries, x, right=right)


def isin(elements: Tensor, test_elements: Tensor) -> Tensor:
    """Return whether each element is among others; on the host."""
    return Tensor(np.isin(elements.numpy(), test_elements.numpy()), elements.device)
