"""A tensor's methods that give its elements another shape or place; each calls the function of the same name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

AnyTensor = TypeVar("AnyTensor")  # Tensor, whose module imports this one
Result = TypeVar("Result", covariant=True)


class Functions(Protocol[Result]):
    def __getattr__(self, name: str) -> Callable[..., Result]: ...


class ShapeMethods(Generic[AnyTensor]):
    """The methods of Tensor that change its shape, or the order of its elements."""

    __slots__ = ()

    _functional: Functions[AnyTensor]  # which imports this file and sets it
    shape: tuple[int, ...]

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the length of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def reshape(self, *shape: int | Sequence[int]) -> AnyTensor:
        """Return the same elements in another shape, one dimension of which may be -1; shares memory."""
        return self._functional.reshape(self, sizes_of(shape))

    def transpose(self, *axes: int | Sequence[int]) -> AnyTensor:
        """Return the tensor with two dimensions swapped, as PyTorch's `transpose(0, 1)`.

        More or fewer numbers, or a sequence, are the new order of all dimensions, reversed by default, as in NumPy.
        """
        if len(axes) == 2 and all(isinstance(axis, (int, np.integer)) for axis in axes):
            return self._functional.swap_dimensions(self, *sizes_of(axes))
        return self._functional.transpose(self, sizes_of(axes) or None)

    def permute(self, *axes: int | Sequence[int]) -> AnyTensor:
        """Return the tensor with its dimensions in the order of `axes`."""
        return self._functional.transpose(self, sizes_of(axes))

    @property
    def T(self) -> AnyTensor:
        """The tensor with its dimensions reversed."""
        return self._functional.transpose(self, None)

    def view(self, *shape: int | Sequence[int]) -> AnyTensor:
        """Return `reshape`, which shares memory as PyTorch's view does."""
        return self._functional.reshape(self, sizes_of(shape))

    def expand(self, *shape: int | Sequence[int]) -> AnyTensor:
        """Return the tensor repeated along dimensions of size 1 and new ones in front; -1 keeps a size."""
        return self._functional.broadcast_to(self, sizes_of(shape))

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    ndimension, nelement = dim, numel

    def contiguous(self) -> AnyTensor:
        """Return the tensor itself, or a copy of a view whose elements PyTorch has apart."""
        return self._functional.contiguous(self)

    def is_contiguous(self) -> bool:
        """Return whether the elements are in their order, one behind the other: True, but for views."""
        return True

    def stride(self, dim: int | None = None) -> Any:
        """Return how many elements apart neighbours along each dimension are, or along one."""
        steps = tuple([math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))])
        return steps if dim is None else steps[dim]

    @property
    def mT(self) -> AnyTensor:
        """The tensor with its last two dimensions swapped."""
        return self._functional.swap_dimensions(self, -2, -1)

    def view_as(self, other: Any) -> AnyTensor:
        """Return the elements in the shape of another tensor."""
        return self._functional.reshape(self, other.shape)

    def expand_as(self, other: Any) -> AnyTensor:
        """Return the tensor repeated to the shape of another one."""
        return self._functional.broadcast_to(self, other.shape)

    def t(self) -> AnyTensor:
        """Return a matrix transposed."""
        return self._functional.transpose(self, None)


def sizes_of(given: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(given) == 1 and not isinstance(given[0], (int, np.integer)):
        return tuple(map(index, given[0]))
    return tuple(map(index, given))  # type: ignore[arg-type]
