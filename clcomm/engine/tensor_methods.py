"""A tensor's methods that compute; each calls the function of the same name."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from clcomm.engine.tensor_in_place import InPlaceMethods
from clcomm.engine.tensor_shapes import AnyTensor
from clcomm.errors import ArgumentError


class Removable(NamedTuple):
    """A hook's handle: `remove()` ends it."""

    remove: Callable[[], None]


class TensorMethods(InPlaceMethods[AnyTensor]):
    """The methods of Tensor, which derives from this class."""

    __slots__ = ()

    def clone(self) -> AnyTensor:
        """Return a copy through which gradients pass."""
        return self._functional.clone(self)

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers; waits for the queue."""
        return self.numpy().tolist()  # type: ignore[attr-defined]

    def requires_grad_(self, requires_grad: builtins.bool = True) -> AnyTensor:
        """Set `requires_grad`; return the tensor."""
        self.requires_grad = requires_grad  # type: ignore[misc]
        return self  # type: ignore[return-value]

    def register_hook(self, hook: Callable[[AnyTensor], AnyTensor | None]) -> Removable:
        """Call `hook(gradient)` in each backward once the tensor's gradient is complete; a result stands for it.

        A leaf adds what results to its `grad`. A replayed step calls no hooks, as no Python. Returns a handle, whose
        `remove()` ends it. Raises ArgumentError for a tensor that needs no gradient.
        """
        if not self.requires_grad:
            raise ArgumentError("register_hook: expected a tensor that needs a gradient, got one that does not")
        node: Any = self._node  # type: ignore[attr-defined]
        if node is None:
            return Removable(self.register_post_accumulate_grad_hook(hook, planned=None))  # type: ignore[attr-defined]
        node.hooks = (*node.hooks, hook)

        def remove() -> None:
            node.hooks = tuple([each for each in node.hooks if each is not hook])

        return Removable(remove)

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

    def median(self, *args: Any, **named: Any) -> Any:
        """Return the lower median, or (values, indices) along a dimension. See `functional.median`."""
        return self._functional.median(self, *args, **named)

    def scatter(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the tensor with other elements at indices along a dimension. See `functional.scatter`."""
        return self._functional.scatter(self, *args, **named)

    def scatter_add(self, *args: Any, **named: Any) -> AnyTensor:
        """Return the tensor with elements added at indices along a dimension. See `functional.scatter_add`."""
        return self._functional.scatter_add(self, *args, **named)

    def unfold(self, dimension: builtins.int, size: builtins.int, step: builtins.int) -> AnyTensor:
        """Return the windows of `size` along a dimension, as a last one. See `functional.windows`."""
        return self._functional.windows(self, dimension, size, step)

    def neg(self) -> AnyTensor:
        """Return -x of each element."""
        return self._functional.mul(self, -1)

    def reciprocal(self) -> AnyTensor:
        """Return 1 / x of each element."""
        return self._functional.div(1.0, self)

    def log1p(self) -> AnyTensor:
        """Return log(1 + x) of each element."""
        return self._functional.log1p(self)

    def floor(self) -> AnyTensor:
        """Return the next whole number below each element."""
        return self._functional.floor(self)

    def ceil(self) -> AnyTensor:
        """Return the next whole number above each element."""
        return self._functional.ceil(self)

    def round(self) -> AnyTensor:
        """Return the nearest whole number, the even one of two."""
        return self._functional.round(self)

    def trunc(self) -> AnyTensor:
        """Return each element without its fraction."""
        return self._functional.trunc(self)

    def sign(self) -> AnyTensor:
        """Return 1, 0 or -1 of each element."""
        return self._functional.sign(self)

    def isnan(self) -> AnyTensor:
        """Return whether each element is NaN."""
        return self._functional.not_equal_to(self, self)

    def isinf(self) -> AnyTensor:
        """Return whether each element is infinite."""
        return self._functional.equal_to(self._functional.abs(self), math.inf)

    def isfinite(self) -> AnyTensor:
        """Return whether each element is neither infinite nor NaN."""
        return self._functional.less_than(self._functional.abs(self), math.inf)

    def dot(self, other: AnyTensor) -> AnyTensor:
        """Return the sum of the products of each two elements, of two tensors of one dimension."""
        return self._functional.dot(self, other)

    def outer(self, other: AnyTensor) -> AnyTensor:
        """Return all products of an element and one of the other tensor's, both of one dimension."""
        return self._functional.outer(self, other)

    def maximum(self, other: AnyTensor) -> AnyTensor:
        """Return the larger of each two elements."""
        return self._functional.maximum(self, other)

    def minimum(self, other: AnyTensor) -> AnyTensor:
        """Return the smaller of each two elements."""
        return self._functional.minimum(self, other)

    def nonzero(self) -> AnyTensor:
        """Return the indices of all elements that are not 0, [number, dimensions]; read to the host."""
        return self.new_tensor(np.argwhere(self.numpy()))  # type: ignore[attr-defined]
