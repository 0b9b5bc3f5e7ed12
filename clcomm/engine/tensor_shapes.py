"""A tensor's methods that give its elements another shape or place; each calls the function of the same name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> AnyTensor:
        """Return the tensor with the dimensions from `start_dim` to `end_dim` merged into one."""
        return self._functional.flatten(self, start_dim, end_dim)

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

    def contiguous(self) -> AnyTensor:
        """Return the tensor itself, as all are contiguous."""
        return self  # type: ignore[return-value]

    def view_as(self, other: Any) -> AnyTensor:
        """Return the elements in the shape of another tensor."""
        return self._functional.reshape(self, other.shape)

    def expand_as(self, other: Any) -> AnyTensor:
        """Return the tensor repeated to the shape of another one."""
        return self._functional.broadcast_to(self, other.shape)

    def t(self) -> AnyTensor:
        """Return a matrix transposed."""
        return self._functional.transpose(self, None)

    def squeeze(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the tensor without dimensions of size 1. See `functional.squeeze`."""
        return self._functional.squeeze(self, *args, **named)

    def unsqueeze(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the tensor with one more dimension, of size 1. See `functional.unsqueeze`."""
        return self._functional.unsqueeze(self, *args, **named)

    def gather(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the elements at indices along a dimension. See `functional.gather`."""
        return self._functional.gather(self, *args, **named)

    def index_select(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the slices at indices along a dimension. See `functional.index_select`."""
        return self._functional.index_select(self, *args, **named)

    def tril(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the tensor with zeros above a diagonal. See `functional.tril`."""
        return self._functional.tril(self, *args, **named)

    def triu(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the tensor with zeros below a diagonal. See `functional.triu`."""
        return self._functional.triu(self, *args, **named)

    def chunk(self, *args: Any, **named: Any) -> Any:
        """Return parts along a dimension. See `functional.chunk`."""
        return self._functional.chunk(self, *args, **named)

    def split(self, *args: Any, **named: Any) -> Any:
        """Return parts along a dimension. See `functional.split`."""
        return self._functional.split(self, *args, **named)

    def repeat(self, *sizes: int | Sequence[int]) -> AnyTensor:
        """Return the tensor several times along each dimension. See `functional.repeat`."""
        return self._functional.repeat(self, *sizes)

    def flip(self, *dims: int | Sequence[int]) -> AnyTensor:
        """Return the tensor with the order along dimensions reversed. See `functional.flip`."""
        return self._functional.flip(self, *dims)

    def roll(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the tensor with its elements shifted along dimensions. See `functional.roll`."""
        return self._functional.roll(self, *args, **named)

    def narrow(self, *args: Any, **named: Any) -> AnyTensor:
        """Return some elements along a dimension. See `functional.narrow`."""
        return self._functional.narrow(self, *args, **named)

    def unbind(self, *args: Any, **named: Any) -> Any:
        """Return the parts along a dimension, without it. See `functional.unbind`."""
        return self._functional.unbind(self, *args, **named)


def sizes_of(given: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(given) == 1 and not isinstance(given[0], (int, np.integer)):
        return tuple(int(n) for n in given[0])
    return tuple(int(n) for n in given)  # type: ignore[arg-type]
