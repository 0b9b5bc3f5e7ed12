"""A tensor's operators, as NumPy's and PyTorch's; each calls a function of `functional`."""

from __future__ import annotations

import operator as op
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from clcomm.engine.tensor_methods import TensorMethods
from clcomm.engine.tensor_shapes import AnyTensor


class _Comparing(threading.local):
    """Whether this thread compares tensors as objects, as those who look for a changed one do."""

    by_identity = False


comparing = _Comparing()


def _in_place(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, other: x._functional.overwrite(x, lambda old: operation(old, other))


class TensorOperators(TensorMethods[AnyTensor]):
    """The operators of Tensor, which derives from this class."""

    __slots__ = ()

    if TYPE_CHECKING:

        def item(self) -> float | int: ...

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "ib":
            raise TypeError(f"index: expected a tensor of one whole number, got {self.dtype}")
        return int(self.item())

    def __format__(self, text: str) -> str:
        return format(self.item(), text) if not self.shape else object.__format__(self, text)

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

    # In place: all names and views of the tensor see it, as in PyTorch.
    __iadd__, __isub__, __imul__, __itruediv__, __ifloordiv__, __imod__, __ipow__ = map(
        _in_place, (op.add, op.sub, op.mul, op.truediv, op.floordiv, op.mod, op.pow)
    )
    __iand__, __ior__, __ixor__, __ilshift__, __irshift__ = map(
        _in_place, (op.and_, op.or_, op.xor, op.lshift, op.rshift)
    )

    def __neg__(self) -> AnyTensor:
        return self._functional.mul(self, -1)

    def __floordiv__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.floor_divide(self, other)

    def __rfloordiv__(self, other: float) -> AnyTensor:
        return self._functional.floor_divide(other, self)

    def __rmod__(self, other: float) -> AnyTensor:
        return self._functional.remainder(other, self)

    def __mod__(self, other: AnyTensor | float) -> AnyTensor:
        """Return the rest of a division, with the divisor's sign. See `functional.remainder`."""
        return self._functional.remainder(self, other)

    def __matmul__(self, other: AnyTensor) -> AnyTensor:
        return self._functional.matmul(self, other)

    def __eq__(self, other: object) -> Any:
        """Return whether each element is equal, as booleans; False for None. Raises ArgumentError for other types."""
        if other is None or comparing.by_identity:
            return self is other
        return self._functional.equal_to(self, other)

    def __ne__(self, other: object) -> Any:
        if other is None or comparing.by_identity:
            return self is not other
        return self._functional.not_equal_to(self, other)

    def __lt__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.less_than(self, other)

    def __le__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.less_or_equal(self, other)

    def __gt__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.greater_than(self, other)

    def __ge__(self, other: AnyTensor | float) -> AnyTensor:
        return self._functional.greater_or_equal(self, other)

    def __and__(self, other: AnyTensor) -> AnyTensor:
        return self._functional.logical_and(self, other)

    def __or__(self, other: AnyTensor) -> AnyTensor:
        return self._functional.logical_or(self, other)

    def __xor__(self, other: AnyTensor) -> AnyTensor:
        return self._functional.logical_xor(self, other)

    def __lshift__(self, bits: AnyTensor | int) -> AnyTensor:
        return self._functional.shifted("<<", self, bits)

    def __rshift__(self, bits: AnyTensor | int) -> AnyTensor:
        return self._functional.shifted(">>", self, bits)

    def __invert__(self) -> AnyTensor:
        return self._functional.logical_not(self)

    def __pow__(self, exponent: AnyTensor | float) -> AnyTensor:
        return self._functional.pow(self, exponent)

    def __rpow__(self, base: float) -> AnyTensor:
        return self._functional.pow(base, self)

    def __abs__(self) -> AnyTensor:
        return self._functional.abs(self)

    __hash__ = object.__hash__

    def __getitem__(self, index: object) -> AnyTensor:
        """Return a part of the tensor as NumPy does, as a copy. See `functional.take`."""
        return self._functional.take(self, index)

    def __reversed__(self) -> AnyTensor:
        return self._functional.flip(self, 0)

    def __iter__(self) -> Iterator[AnyTensor]:
        """Yield the parts along the first dimension; raises TypeError for a tensor without dimensions."""
        return (self[number] for number in range(len(self)))  # type: ignore[arg-type]

    #: With a NumPy array on the left, Python calls the methods above, which raise an error.
    __array_ufunc__ = None
