"""A tensor's NumPy-like operators and methods; each calls the function of the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from clcomm.errors import ArgumentError

AnyTensor = TypeVar("AnyTensor")  # Tensor, whose module imports this one
Result = TypeVar("Result", covariant=True)


class Functions(Protocol[Result]):
    def __getattr__(self, name: str) -> Callable[..., Result]: ...


class TensorOperators(Generic[AnyTensor]):
    """The operators of Tensor, which derives from this class."""

    __slots__ = ()

    _functional: Functions[AnyTensor]  # which imports this file and sets it

    def __add__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.add(self, other)

    def __sub__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.sub(self, other)

    def __mul__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.mul(self, other)

    def __truediv__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.div(self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: float) -> AnyTensor:
        return self._functional.sub(other, self)

    def __rtruediv__(self, other: float) -> AnyTensor:
        return self._functional.div(other, self)

    def __iadd__(self, other: AnyTensor | float) -> AnyTensor:
        """Add in place: all names and views of the tensor see it, as in PyTorch."""
        return self._functional.overwrite(self, lambda x: x + other)

    def __isub__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.overwrite(self, lambda x: x - other)

    def __imul__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.overwrite(self, lambda x: x * other)

    def __itruediv__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.overwrite(self, lambda x: x / other)

    def __neg__(self) -> AnyTensor:
        return self._functional.mul(self, -1.0)

    def __matmul__(self, other: AnyTensor) -> AnyTensor:
        return self._functional.matmul(self, other)

    def __eq__(self, other: object) -> bool:
        """Raise ArgumentError for anything but None: PyTorch compares elements, and there is no such kernel here."""
        if other is None or self is other:
            return self is other
        raise ArgumentError(
            f"==: expected None, got {type(other).__name__}, as elements are not compared here; compare "
            "x.numpy(), or tensors themselves by `is`"
        )

    __hash__ = object.__hash__

    def __getitem__(self, index: object) -> AnyTensor:
        """Return a part of the tensor as NumPy does, as a copy: whole numbers, slices with any step, `...` and None."""
        return self._functional.take(self, index)

    def __iter__(self) -> Iterator[AnyTensor]:
        """Yield the parts along the first dimension; raises TypeError for a tensor without dimensions."""
        return (self[number] for number in range(len(self)))  # type: ignore[arg-type]

    #: With a NumPy array on the left, Python calls the methods above, which raise an error.
    __array_ufunc__ = None

    def reshape(self, *shape: int | Sequence[int]) -> AnyTensor:
        """Return the same elements in another shape, one dimension of which may be -1; shares memory."""
        return self._functional.reshape(self, _sizes(shape))

    def flatten(self, start_dim: int = 0) -> AnyTensor:
        """Return the tensor with the dimensions from `start_dim` on merged into one."""
        return self._functional.flatten(self, start_dim)

    def transpose(self, *axes: int | Sequence[int]) -> AnyTensor:
        """Return the tensor with two dimensions swapped, as PyTorch's `transpose(0, 1)`.

        More or fewer numbers, or a sequence, are the new order of all dimensions, reversed by default, as in NumPy.
        """
        if len(axes) == 2 and all(isinstance(axis, (int, np.integer)) for axis in axes):
            return self._functional.swap_dimensions(self, *_sizes(axes))
        return self._functional.transpose(self, _sizes(axes) or None)

    def permute(self, *axes: int | Sequence[int]) -> AnyTensor:
        """Return the tensor with its dimensions in the order of `axes`."""
        return self._functional.transpose(self, _sizes(axes))

    @property
    def T(self) -> AnyTensor:
        """The tensor with its dimensions reversed."""
        return self._functional.transpose(self, None)

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> AnyTensor:
        """Return the sum over all elements, or over the dimensions `axis`."""
        return self._functional.sum(self, axis, keepdims)

    def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> AnyTensor:
        """Return the mean over all elements, or over the dimensions `axis`."""
        return self._functional.mean(self, axis, keepdims)

    def var(self, axis: int | Sequence[int] | None = None, correction: int = 1, keepdims: bool = False) -> AnyTensor:
        """Return the variance over all elements, or over the dimensions `axis`; unbiased with a correction of 1."""
        return self._functional.var(self, axis, correction, keepdims)

    def relu(self) -> AnyTensor:
        """Return max(x, 0) of each element."""
        return self._functional.relu(self)

    def sigmoid(self) -> AnyTensor:
        """Return 1 / (1 + exp(-x)) of each element."""
        return self._functional.sigmoid(self)

    def tanh(self) -> AnyTensor:
        """Return the hyperbolic tangent of each element."""
        return self._functional.tanh(self)

    def softmax(self, axis: int = -1) -> AnyTensor:
        """Return exp(x) / sum(exp(x)) along `axis`."""
        return self._functional.softmax(self, axis)

    def log_softmax(self, axis: int = -1) -> AnyTensor:
        """Return x - log(sum(exp(x))) along `axis`."""
        return self._functional.log_softmax(self, axis)

    def argmax(self) -> AnyTensor:
        """Return the int32 index of the largest element along the last dimension (no gradient)."""
        return self._functional.argmax(self)


def _sizes(given: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(given) == 1 and not isinstance(given[0], (int, np.integer)):
        return tuple(int(n) for n in given[0])
    return tuple(int(n) for n in given)  # type: ignore[arg-type]
