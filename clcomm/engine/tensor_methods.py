"""A tensor's methods; each calls the function of the same name."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

AnyTensor = TypeVar("AnyTensor")  # Tensor, whose module imports this one
Result = TypeVar("Result", covariant=True)


class Functions(Protocol[Result]):
    def __getattr__(self, name: str) -> Callable[..., Result]: ...


class TensorMethods(Generic[AnyTensor]):
    """The methods of Tensor, which derives from this class."""

    __slots__ = ()

    _functional: Functions[AnyTensor]  # which imports this file and sets it

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

    def view(self, *shape: int | Sequence[int]) -> AnyTensor:
        """Return `reshape`, which shares memory as PyTorch's view does."""
        return self._functional.reshape(self, _sizes(shape))

    def expand(self, *shape: int | Sequence[int]) -> AnyTensor:
        """Return the tensor repeated along dimensions of size 1 and new ones in front; -1 keeps a size."""
        return self._functional.broadcast_to(self, _sizes(shape))

    def clone(self) -> AnyTensor:
        """Return a copy through which gradients pass."""
        return self._functional.clone(self)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim  # type: ignore[attr-defined,no-any-return]

    def numel(self) -> int:
        """Return the number of elements."""
        return self.size  # type: ignore[attr-defined,no-any-return]

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers; waits for the queue."""
        return self.numpy().tolist()  # type: ignore[attr-defined]

    def contiguous(self) -> AnyTensor:
        """Return the tensor itself, as all are contiguous."""
        return self  # type: ignore[return-value]

    def requires_grad_(self, requires_grad: builtins.bool = True) -> AnyTensor:
        """Set `requires_grad`; return the tensor."""
        self.requires_grad = requires_grad  # type: ignore[misc]
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

    def matmul(self, other: AnyTensor) -> AnyTensor:
        """Return the product of matrices. See `functional.matmul`."""
        return self._functional.matmul(self, other)

    mm = bmm = matmul

    def add(self, other: Any) -> AnyTensor:
        """Return the sum of each two elements."""
        return self._functional.add(self, other)

    def sub(self, other: Any) -> AnyTensor:
        """Return the difference of each two elements."""
        return self._functional.sub(self, other)

    def mul(self, other: Any) -> AnyTensor:
        """Return the product of each two elements."""
        return self._functional.mul(self, other)

    def div(self, other: Any) -> AnyTensor:
        """Return the quotient of each two elements."""
        return self._functional.div(self, other)

    def long(self) -> AnyTensor:
        """Return `int`: there are no longer integers."""
        return self._functional.to_int(self)

    def eq(self, other: Any) -> AnyTensor:
        """Return whether each element is equal."""
        return self._functional.equal_to(self, other)

    def masked_fill(self, mask: AnyTensor, value: float) -> AnyTensor:
        """Return the tensor with `value` where `mask` is true."""
        return self._functional.masked_fill(self, mask, value)

    def relu(self) -> AnyTensor:
        """Return max(x, 0) of each element."""
        return self._functional.relu(self)

    def sigmoid(self) -> AnyTensor:
        """Return 1 / (1 + exp(-x)) of each element."""
        return self._functional.sigmoid(self)

    def tanh(self) -> AnyTensor:
        """Return the hyperbolic tangent of each element."""
        return self._functional.tanh(self)

    def exp(self) -> AnyTensor:
        """Return e^x of each element."""
        return self._functional.exp(self)

    def log(self) -> AnyTensor:
        """Return the natural logarithm of each element."""
        return self._functional.log(self)

    def sqrt(self) -> AnyTensor:
        """Return the square root of each element."""
        return self._functional.sqrt(self)

    def rsqrt(self) -> AnyTensor:
        """Return 1 / sqrt(x) of each element."""
        return self._functional.rsqrt(self)

    def abs(self) -> AnyTensor:
        """Return |x| of each element."""
        return self._functional.abs(self)

    def square(self) -> AnyTensor:
        """Return x * x of each element."""
        return self._functional.square(self)

    def sin(self) -> AnyTensor:
        """Return the sine of each element."""
        return self._functional.sin(self)

    def cos(self) -> AnyTensor:
        """Return the cosine of each element."""
        return self._functional.cos(self)

    def erf(self) -> AnyTensor:
        """Return the error function of each element."""
        return self._functional.erf(self)

    def float(self) -> AnyTensor:
        """Return the tensor as float32: 1 for true."""
        return self._functional.to_float(self)

    def int(self) -> AnyTensor:
        """Return the tensor as int32, without fractions and gradient."""
        return self._functional.to_int(self)

    def bool(self) -> AnyTensor:
        """Return whether each element is not 0."""
        return self._functional.to_bool(self)

    def sum(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the sum over all elements, or over dimensions; of booleans their number. See `functional.sum`."""
        return self._functional.sum(self, *args, **named)

    def mean(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the mean over all elements, or over dimensions. See `functional.mean`."""
        return self._functional.mean(self, *args, **named)

    def var(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the variance over all elements, or over dimensions. See `functional.var`."""
        return self._functional.var(self, *args, **named)

    def std(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the root of the variance. See `functional.std`."""
        return self._functional.std(self, *args, **named)

    def norm(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the norm of all elements, or over dimensions. See `functional.norm`."""
        return self._functional.norm(self, *args, **named)

    def prod(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the product of all elements, or along a dimension. See `functional.prod`."""
        return self._functional.prod(self, *args, **named)

    def softmax(self, *args: Any, **named: Any) -> AnyTensor:
        """Return exp(x) / sum(exp(x)) along a dimension. See `functional.softmax`."""
        return self._functional.softmax(self, *args, **named)

    def log_softmax(self, *args: Any, **named: Any) -> AnyTensor:
        """Return x - log(sum(exp(x))) along a dimension. See `functional.log_softmax`."""
        return self._functional.log_softmax(self, *args, **named)

    def logsumexp(self, *args: Any, **named: Any) -> AnyTensor:
        """Return log(sum(exp(x))) along dimensions. See `functional.logsumexp`."""
        return self._functional.logsumexp(self, *args, **named)

    def argmax(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the index of the largest element, of all or along a dimension. See `functional.argmax`."""
        return self._functional.argmax(self, *args, **named)

    def argmin(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the index of the smallest element, of all or along a dimension. See `functional.argmin`."""
        return self._functional.argmin(self, *args, **named)

    def argsort(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the indices that sort along a dimension. See `functional.argsort`."""
        return self._functional.argsort(self, *args, **named)

    def cumsum(self, *args: Any, **named: Any) -> AnyTensor:
        """Return running sums along a dimension. See `functional.cumsum`."""
        return self._functional.cumsum(self, *args, **named)

    def clamp(self, *args: Any, **named: Any) -> AnyTensor:
        """Return each element, or the limit beyond which it lies. See `functional.clamp`."""
        return self._functional.clamp(self, *args, **named)

    def any(self, *args: Any, **named: Any) -> AnyTensor:
        """Return whether any element is not 0. See `functional.any`."""
        return self._functional.any(self, *args, **named)

    def all(self, *args: Any, **named: Any) -> AnyTensor:
        """Return whether no element is 0. See `functional.all`."""
        return self._functional.all(self, *args, **named)

    def pow(self, *args: Any, **named: Any) -> AnyTensor:
        """Return each element to the power of a number. See `functional.pow`."""
        return self._functional.pow(self, *args, **named)

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

    def max(self, *args: Any, **named: Any) -> Any:
        """Return the largest element, or (values, indices) along a dimension. See `functional.max`."""
        return self._functional.max(self, *args, **named)

    def min(self, *args: Any, **named: Any) -> Any:
        """Return the smallest element, or (values, indices) along a dimension. See `functional.min`."""
        return self._functional.min(self, *args, **named)

    def sort(self, *args: Any, **named: Any) -> Any:
        """Return (values, indices) sorted along a dimension. See `functional.sort`."""
        return self._functional.sort(self, *args, **named)

    def topk(self, *args: Any, **named: Any) -> Any:
        """Return (values, indices) of the largest along a dimension. See `functional.topk`."""
        return self._functional.topk(self, *args, **named)

    def chunk(self, *args: Any, **named: Any) -> Any:
        """Return parts along a dimension. See `functional.chunk`."""
        return self._functional.chunk(self, *args, **named)

    def split(self, *args: Any, **named: Any) -> Any:
        """Return parts along a dimension. See `functional.split`."""
        return self._functional.split(self, *args, **named)


def _sizes(given: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    if len(given) == 1 and not isinstance(given[0], (int, np.integer)):
        return tuple(int(n) for n in given[0])
    return tuple(int(n) for n in given)  # type: ignore[arg-type]
