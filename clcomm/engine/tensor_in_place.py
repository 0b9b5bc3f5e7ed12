"""A tensor's methods that change it in place, with PyTorch's names, and those that give it another type or device."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device
from clcomm.engine.tensor_shapes import AnyTensor, ShapeMethods

if TYPE_CHECKING:
    from clcomm.engine.device import Device

#: The types by the names that PyTorch's type() has for them.
_TYPE_NAMES = {
    np.dtype(kind): name
    for kind, name in (
        ("float32", "FloatTensor"), ("float64", "DoubleTensor"), ("float16", "HalfTensor"), ("bool", "BoolTensor"),
        ("uint8", "ByteTensor"), ("int8", "CharTensor"), ("int16", "ShortTensor"), ("int32", "IntTensor"),
        ("int64", "LongTensor"),
    )
}  # fmt: skip


class InPlaceMethods(ShapeMethods[AnyTensor]):
    """The methods of Tensor that write to it: all names and views of the tensor see it. See `functional.overwrite`."""

    __slots__ = ()
    dtype: np.dtype[Any]
    #: Those that draw; `nn.init`, which has the generator, sets them.
    normal_: Callable[..., AnyTensor]
    uniform_: Callable[..., AnyTensor]
    random_: Callable[..., AnyTensor]
    bernoulli_: Callable[..., AnyTensor]

    def __setitem__(self, index: object, value: object) -> None:
        """Give a part other values. See `functional.assign`."""
        self._functional.assign(self, index, value)

    def add_(self, other: Any, *, alpha: float = 1.0) -> AnyTensor:
        """Add alpha * other."""
        return self._functional.overwrite(self, lambda x: x + (other if alpha == 1 else other * alpha))

    def sub_(self, other: Any, *, alpha: float = 1.0) -> AnyTensor:
        """Subtract alpha * other."""
        return self._functional.overwrite(self, lambda x: x - (other if alpha == 1 else other * alpha))

    def fill_(self, value: Any) -> AnyTensor:
        """Write a number to all elements."""
        self._functional.assign(self, ..., value)
        return self  # type: ignore[return-value]

    def zero_(self) -> AnyTensor:
        """Write 0 to all elements."""
        return self.fill_(0.0)

    def copy_(self, source: Any) -> AnyTensor:
        """Write the elements of a tensor or array that broadcasts to this tensor's shape."""
        self._functional.assign(self, ..., source if isinstance(source, ShapeMethods) else _like(self, source))
        return self  # type: ignore[return-value]

    # -- types and devices

    @property
    def data(self) -> AnyTensor:
        """The tensor on the same memory, not on the tape: writes to it are not recorded."""
        return self.detach()  # type: ignore[attr-defined,no-any-return]

    def cpu(self) -> AnyTensor:
        """Return the tensor itself, whose values `numpy()` has: it stays on its device."""
        return self  # type: ignore[return-value]

    def to(self, *wanted: object, non_blocking: builtins.bool = False, **named: object) -> AnyTensor:
        """Return the tensor as another type, or on another device: itself where it is so already.

        wanted, or `dtype` and `device`: a type (float32, int32 or bool), a Device or its name, or a tensor that has
        both. A copy on another device is not on the tape. Raises ArgumentError for other types.
        """
        result: Any = self
        for each in (*wanted, *[value for name, value in named.items() if name in ("dtype", "device")]):
            if isinstance(each, ShapeMethods):
                result = result.to(each.device, each.dtype)  # type: ignore[attr-defined]
            elif isinstance(each, (str, Device)):
                result = result if each in (result.device, result.device.kind) else self._on(result, each)  # type: ignore[attr-defined]
            elif each is not None:
                result = _cast(result, each)
        return result  # type: ignore[no-any-return]

    def type(self, dtype: object = None) -> Any:
        """Return the tensor as another type, see `to`; without one PyTorch's name of its own: "torch.FloatTensor"."""
        if dtype is None:
            return f"torch.{_TYPE_NAMES[self.dtype]}"
        named = {f"torch.{name}": each for each, name in _TYPE_NAMES.items()}
        return self.to(named.get(dtype, dtype) if isinstance(dtype, str) else dtype)

    def is_floating_point(self) -> builtins.bool:
        """Return whether the elements are float32."""
        return self.dtype.kind == "f"

    def element_size(self) -> int:
        """Return the bytes of an element: four, of all types."""
        return 4

    @property
    def is_leaf(self) -> builtins.bool:
        """Whether no operation on the tape made the tensor."""
        return self.grad_fn is None

    @property
    def grad_fn(self) -> Any:
        """The operation on the tape that made the tensor, None of a leaf."""
        return self._node  # type: ignore[attr-defined]

    @property
    def is_cuda(self) -> builtins.bool:
        """False: the device is OpenCL's."""
        return False

    is_xpu = is_cuda

    def type_as(self, other: Any) -> AnyTensor:
        """Return the tensor as another one's type."""
        return self.to(other.dtype)

    def new_tensor(self, values: object) -> AnyTensor:
        """Return values as a tensor of the same type, on the same device."""
        return _like(self, values).to(self.dtype)  # type: ignore[no-any-return]

    def new_zeros(self, *shape: Any) -> AnyTensor:
        """Return zeros of this tensor's type on its device."""
        return self.new_full(_flat(shape), 0)

    new_empty = new_zeros

    def new_ones(self, *shape: Any) -> AnyTensor:
        """Return ones of this tensor's type on its device."""
        return self.new_full(_flat(shape), 1)

    def new_full(self, shape: Any, value: Any) -> AnyTensor:
        """Return a tensor of one value, of this tensor's type on its device."""
        return _like(self, np.full(shape, value, self.dtype))  # type: ignore[no-any-return]


def _like(tensor: Any, values: object) -> Any:
    return tensor._on(values, tensor.device)


def _flat(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape


def _cast(tensor: Any, dtype: object) -> Any:
    try:
        own = getattr(dtype, "dtype", None)  # that of a constructor such as as_torch.FloatTensor
        wanted: np.dtype = np.dtype(own if isinstance(own, np.dtype) else dtype)  # type: ignore[call-overload]
    except TypeError:
        raise ArgumentError(f"to: expected a type, a device or a tensor, got {dtype!r}") from None
    if wanted == np.float32:
        return tensor.float()
    if wanted in (np.int32, np.int64):  # int64 is PyTorch's type of indices
        return tensor.long()
    if wanted == np.bool_:
        return tensor.bool()
    raise ArgumentError(f"to: expected float32, int32 or bool, got {wanted}; values are float32")
