"""A tensor's methods that change it in place, with PyTorch's names, and those that give it another type or device."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import HANDED_OUT, host_array
from clcomm.engine.device import Device
from clcomm.engine.tensor_functions import AnyTensor, ShapeMethods

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


# --- Tensors as host arrays on the same memory, for NumPy, PyTorch and others: DLPack and NumPy's array interface. ---

#: DLPack's kDLCPU, and the number of the only such device.
_CPU = 1, 0


class HostExchange:
    """The array interfaces of a tensor on a CPU device; a base of Tensor.

    Nothing is copied: the tensor and the arrays made of it share one memory, which lives as long as either is used. The
    queue is finished before the memory is handed out; a program that writes to it, or reads later results, waits with
    `tensor.device.finish()`. A parameter moves to other memory when its module's flat space is made, at the first
    optimizer or Synchronizer; arrays from before keep their old values.
    """

    __slots__ = ()

    #: Whether other libraries get a copy, as the memory is not the tensor's own.
    exports_copy = False
    device: Device
    buffer: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    numpy: Callable[[], np.ndarray]

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's name of the host's memory; BufferError for a device with memory of its own."""
        self._require_host_memory()
        return _CPU

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return the tensor as a DLPack capsule (https://dmlc.github.io/dlpack); arguments as in the array API.

        Raises BufferError for a device with memory of its own, for copy=False where others get a copy, which is of
        booleans, gradients in a flat space and parameters stored in 16 bits, and for a `stream` or a `dl_device` other
        than the host.
        """
        self._require_host_memory()
        if copy is False and (self.exports_copy or self.dtype.kind == "b"):
            raise BufferError("got one of which others get a copy; use numpy() and copy_from()")
        options: dict[str, Any] = {"stream": stream}
        if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
            options |= {"max_version": max_version, "dl_device": dl_device, "copy": copy}
        return self._as_host_array().__dlpack__(**options)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """NumPy's array interface, version 3; AttributeError for a device with memory of its own."""
        if not self.device.shares_host_memory:
            raise AttributeError("__array_interface__: the tensor is in a device's own memory; use numpy()")
        array = self._as_host_array()
        if self.exports_copy:
            array.flags.writeable = False  # a write would be lost
        # As an object the memory is kept by whoever reads this, also where the tensor gets another buffer.
        return {**array.__array_interface__, "data": array}

    def _require_host_memory(self) -> None:
        if not self.device.shares_host_memory:
            raise BufferError(f"tensor: expected one in the host's memory, got one on {self.device}; use numpy()")

    def _as_host_array(self) -> np.ndarray:
        if self.dtype.kind == "b":  # kernels have them in 4 bytes each
            copied = self.numpy()
            copied.flags.writeable = False
            return copied
        self.buffer.known = None, ()  # what others write there is not noted
        address = self.device.host_address(self.buffer, max(math.prod(self.shape), 1) * self.dtype.itemsize)
        memory = _Memory(address, self.shape, self.dtype, partial(self.device.note_write, self.buffer))
        first = HANDED_OUT.setdefault(address, memory)
        memory.first = first if first is not memory else None
        return np.asarray(memory)


class _Memory:
    """The memory of a buffer, which arrays on it keep alive, and with it the one that is known for its address."""

    __slots__ = ("__array_interface__", "__weakref__", "first", "nbytes", "note_write")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype, note_write: Callable[[], None]):
        self.first: _Memory | None = None
        self.note_write = note_write  # which has the buffer
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": dtype.str, "version": 3}


def array_from_dlpack(exporter: object) -> np.ndarray:
    """Return another library's tensor in the host's memory as an array on that memory.

    Raises ArgumentError for objects without `__dlpack__`, on another device, or neither float32 nor int32.
    """
    if not hasattr(exporter, "__dlpack__"):
        raise ArgumentError(f"from_dlpack: expected an object with __dlpack__, got {type(exporter).__name__}")
    array = host_array(exporter, "from_dlpack", may_copy=True)
    if array.dtype not in (np.float32, np.int32):
        raise ArgumentError(f"from_dlpack: expected float32 or int32, got {array.dtype}; convert it first")
    return array
