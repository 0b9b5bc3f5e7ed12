"""The operators and methods that make tensors read like NumPy; each calls the function of the same name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from clcomm.engine.tensor import Shape, Tensor


class TensorOperators:
    """What a Tensor can compute, and nothing of what it is."""

    __slots__ = ()

    #: The module of differentiable functions, which stands above this file and enters itself here.
    _functional: ClassVar[Any]

    def __add__(self, other: Tensor | float) -> Tensor:
        return self._functional.add(self, other)

    def __sub__(self, other: Tensor | float) -> Tensor:
        return self._functional.sub(self, other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        return self._functional.mul(self, other)

    def __truediv__(self, other: Tensor | float) -> Tensor:
        return self._functional.div(self, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: float) -> Tensor:
        return self._functional.sub(other, self)

    def __rtruediv__(self, other: float) -> Tensor:
        return self._functional.div(other, self)

    def __neg__(self) -> Tensor:
        return self._functional.mul(self, -1.0)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self._functional.matmul(self, other)

    #: NumPy arrays on the left leave the operation to the methods above, which refuse them.
    __array_ufunc__ = None

    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        """Return the same elements in another shape, one dimension of which may be -1; shares memory."""
        return self._functional.reshape(self, _sizes(shape))

    def flatten(self, start_dim: int = 0) -> Tensor:
        """Return the tensor with the dimensions from `start_dim` on made one."""
        return self._functional.flatten(self, start_dim)

    def transpose(self, *axes: int | Sequence[int]) -> Tensor:
        """Return the tensor with its dimensions in the order of `axes`, reversed by default, as in NumPy."""
        return self._functional.transpose(self, _sizes(axes) or None)

    @property
    def T(self) -> Tensor:
        """The tensor with its dimensions reversed."""
        return self._functional.transpose(self, None)

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """Return the sum over all elements, or over the dimensions `axis`."""
        return self._functional.sum(self, axis, keepdims)

    def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """Return the mean over all elements, or over the dimensions `axis`."""
        return self._functional.mean(self, axis, keepdims)

    def relu(self) -> Tensor:
        """Return max(x, 0) of each element."""
        return self._functional.relu(self)

    def sigmoid(self) -> Tensor:
        """Return 1 / (1 + exp(-x)) of each element."""
        return self._functional.sigmoid(self)

    def tanh(self) -> Tensor:
        """Return the hyperbolic tangent of each element."""
        return self._functional.tanh(self)

    def softmax(self, axis: int = -1) -> Tensor:
        """Return exp(x) / sum(exp(x)) along `axis`."""
        return self._functional.softmax(self, axis)

    def log_softmax(self, axis: int = -1) -> Tensor:
        """Return x - log(sum(exp(x))) along `axis`."""
        return self._functional.log_softmax(self, axis)

    def argmax(self) -> Tensor:
        """Return the int32 index of the largest element along the last dimension (no gradient)."""
        return self._functional.argmax(self)


def _sizes(given: tuple[int | Sequence[int], ...]) -> Shape:
    if len(given) == 1 and not isinstance(given[0], (int, np.integer)):
        return tuple(int(n) for n in given[0])
    return tuple(int(n) for n in given)  # type: ignore[arg-type]
