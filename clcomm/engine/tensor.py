"""Tensors: a device buffer with a shape, and a place on the tape.

Elements are float32, int32 for class indices, or booleans, which kernels have as int32 of 0 and 1. Memory is
C-contiguous, so a reshaped tensor shares its buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device, default_device
from clcomm.engine.host_exchange import HostExchange, array_from_dlpack
from clcomm.engine.tensor_methods import TensorOperators, require_none_noted

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
BOOL = np.dtype(np.bool_)
_ELEMENT_BYTES = 4  # in the memory of a device, of all types
_MOST_ELEMENTS = 2**31 - 1

Shape = tuple[int, ...]
Outcome = TypeVar("Outcome")


class Node:
    """The operation of which a tensor is the result, on the tape; see autograd.py."""

    inputs: tuple[Tensor | None, ...] | None  # None after backward
    producers: tuple[Node | None, ...]  # of the inputs, which an operation in place may give another since
    needs: tuple[bool, ...]  # whether each input needs a gradient
    saved: tuple[Any, ...]
    order: int
    grad: Tensor | None = None  # the gradient of the result, as far as it is accumulated
    owns_grad = False  # whether `grad` is this node's alone
    mask: Tensor | None = None  # the result of an op that ends in ReLU: where it is not positive or NaN, `grad` is void
    is_masked = False  # whether `grad` is 0 there already
    hooks: tuple[Callable[[Tensor], Tensor | None], ...] = ()  # called with `grad`, for which a result stands


class Tensor(TensorOperators["Tensor"], HostExchange):
    """A float32 array on a device; from integers int32, from booleans boolean.

    Args:
        array_like: the values.
        device: a Device or a name as for `Device.select`; by default `default_device()`.
        requires_grad: whether the tensor is a leaf of the tape, into whose `grad` `backward()` accumulates.
        copy: False: share the array's memory where the device can use it; the array must not change while
            the tensor is in use.

    Raises:
        ArgumentError: values that are not numbers, integers outside int32, or 2**31 or more of them.
    """

    __slots__ = (
        "__weakref__", "_grad", "_hooks", "_node", "_requires_grad", "_source", "buffer", "device", "dtype", "shape",
        "whole_columns",
    )  # fmt: skip

    #: `backward` of autograd.py, which imports this file and sets it.
    _backward: ClassVar[Any]

    buffer: Any
    #: How many columns the rows have of which ranks have a part each; 0: the rows are whole.
    whole_columns: int
    _grad: Tensor | None
    _node: Node | None
    _hooks: list[tuple[Callable[[Tensor], Any], bool | None]] | None  # (hook, planned), of a gradient hook None
    _source: Any  # of a view, see view.py

    def __init__(
        self,
        array_like: object,
        device: Device | str | None = None,
        requires_grad: bool = False,
        *,
        copy: bool = True,
    ):
        array = _host_array(array_like)
        self.device = _device(device)
        self.shape: Shape = array.shape
        self.dtype = array.dtype
        held = array.astype(INT32) if array.dtype == BOOL else array
        self.buffer = self.device.upload(held, copy=copy) if held.size else empty(self.device, ()).buffer
        self._grad = self._node = self._hooks = None
        self._requires_grad = False
        if copy:
            self._note_known(array)
        self.whole_columns = 0
        if requires_grad:
            self.requires_grad = True

    # -- shape

    @property
    def nbytes(self) -> int:
        """Bytes of the elements in the device's memory."""
        return math.prod(self.shape) * _ELEMENT_BYTES

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.item())

    def __repr__(self) -> str:
        extra = ", requires_grad=True" if self._requires_grad else ""
        return f"{self._pickled_as().__name__}({np.array2string(self.numpy(), separator=', ')}, {self.dtype}{extra})"

    # -- values on the host

    def to_host(self) -> np.ndarray:
        """Return `numpy()`, under netcl's name."""
        return self.numpy()

    def numpy(self) -> np.ndarray:
        """Return a copy of the values on the host, read-only, as a write would be lost; waits for the queue."""
        array = np.empty(self.shape, INT32 if self.dtype == BOOL else self.dtype)
        if array.size:
            self.device.read(self.buffer, array)
        if self.dtype == BOOL:
            array = array.astype(BOOL)
        array.flags.writeable = False
        if self.dtype == BOOL:
            return array
        # Perhaps of a target that is no class or an index of nothing, or integers of floats that are none.
        if self.device.in_doubt or self.dtype == INT32 or (array.ndim < 2 and np.isnan(array).any()):
            require_none_noted(self.device)
        return array

    def item(self) -> float | int:
        """Return the value of a tensor of one element as a Python number; waits for the queue."""
        if self.shape and self.numel() != 1:
            raise ArgumentError(f"item: expected a tensor of one element, got shape {self.shape}")
        # A subclass's buffer may be another after it was asked for.
        value = self.device.read_one(self.buffer, self.dtype) if type(self) is Tensor else None
        if value is None:
            value = self.numpy().item()
        elif self.device.in_doubt or value != value or self.dtype == INT32:
            require_none_noted(self.device)
        return value

    def copy_from(self, array_like: Any) -> None:
        """Overwrite the values with a host array of the same shape; waits for the queue."""
        array = self._array_of(array_like)
        if not array.size:
            return
        self.device.write(self.buffer, array.astype(INT32) if self.dtype == BOOL else array)
        self.note_write()
        self._note_known(array)

    def _array_of(self, array_like: Any) -> np.ndarray:
        array = np.ascontiguousarray(array_like, self.dtype).reshape(np.shape(array_like))
        if array.shape != self.shape:
            raise ArgumentError(f"copy_from: expected an array of shape {self.shape}, got {array.shape}")
        return array

    @property
    def written_at(self) -> int:
        """The number, of `orders`, of the last write to the memory by `copy_from`, a step or in place; -1: none."""
        return getattr(self.buffer, "written_at", -1)

    def note_write(self) -> None:
        """Note that the values change: operations before it that kept them have no backward any more."""
        self.device.note_write(self.buffer)
        recorder = self.device.recorder
        if recorder is not None:
            recorder.note_write(self)
        array = getattr(self.buffer, "array_of_values", None)  # see creation.from_numpy
        if array is not None and array.flags.writeable:
            np.copyto(array, self.numpy().reshape(array.shape), casting="unsafe")

    def _note_known(self, array: np.ndarray) -> None:
        if array.dtype == INT32 and array.size:
            least, most = int(array.min()), int(array.max())
            above = [int(array[array != least].min())] if least < 0 and most > least else []
            self.buffer.known = self.written_at, (least, *above, most)

    @property
    def known_values(self) -> tuple[int, ...]:
        """The smallest and the largest of integers that were copied from the host; empty for all other tensors.

        If the smallest is negative, as a label to be ignored is, the next one is between them. An operation that
        decides something by these does so through `decided`.
        """
        version, values = getattr(self.buffer, "known", (None, ()))
        return values if version == self.written_at else ()

    def decided(self, rule: Callable[[tuple[int, ...]], Outcome]) -> Outcome:
        """Return rule(known_values); a recording is replayed only where the rule returns the same of other values."""
        outcome = rule(self.known_values)
        if self.device.recorder is not None:
            self.device.recorder.note_decision(self, rule, outcome)
        return outcome

    # -- copies

    @staticmethod
    def _on(values: object, device: Device | str) -> Tensor:
        return Tensor(values, device)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        """Return a leaf with memory of its own on the same device, without gradient and hooks."""
        kind, (values, _, requires_grad) = self.__reduce__()
        return kind(values, self.device, requires_grad)

    def __copy__(self) -> Tensor:
        """Return a deep copy, as for NumPy arrays; detach() returns a tensor on the same memory."""
        return self.__deepcopy__({})

    def __reduce__(self) -> tuple[type[Tensor], tuple[np.ndarray, None, bool]]:
        """Pickle the values, to be loaded to the default device; raises ArgumentError for an operation's result."""
        if self._node is not None:
            raise ArgumentError("copy: expected a leaf, got the result of an operation; detach() it first")
        return self._pickled_as(), (self.numpy(), None, self._requires_grad)

    def _pickled_as(self) -> type[Tensor]:
        return Tensor

    # -- the tape

    @property
    def requires_grad(self) -> bool:
        """Whether backward() computes a gradient for this tensor; settable on leaves."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if self._node is not None:
            raise ArgumentError("requires_grad: expected a leaf, got the result of an operation; detach() it first")
        if value and self.dtype != FLOAT32:
            raise ArgumentError(f"requires_grad: expected a float32 tensor, got {self.dtype}")
        if self._requires_grad != bool(value):
            self.device.revision += 1
        self._requires_grad = bool(value)

    @property
    def grad(self) -> Tensor | None:
        """The gradient accumulated by backward(), or None."""
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and value.shape != self.shape:
            raise ArgumentError(f"grad: expected shape {self.shape}, got {value.shape}")
        self._grad = value

    def claim_gradient(self) -> Tensor | None:
        """Return the tensor for a kernel to write this leaf's first gradient to; None if there is a gradient."""
        if self._grad is not None:
            return None
        self._refuse_recording()
        self._grad = empty(self.device, self.shape)
        return self._grad

    def gradient_for_update(self) -> Tensor:
        """Return the gradient of a leaf that has one, in memory that may be written to."""
        assert self._grad is not None
        self._refuse_recording()
        self._grad.note_write()
        return self._grad

    def _refuse_recording(self) -> None:
        if self.device.recorder is not None:
            self.device.recorder.refuse("it has gradients outside a flat space; call module.flat_space() before")

    def register_post_accumulate_grad_hook(
        self, hook: Callable[[Tensor], Any], *, planned: bool | None = False
    ) -> Callable[[], None]:
        """Call `hook(self)` in each backward once this leaf's gradient is complete (its last kernel is queued).

        Returns a function that removes the hook.

        Args:
            hook: the function to call.
            planned: whether the hook only returns a function that does its work, or None. That function is called next;
                replays call the one of the recorded run, without the hook. None: as of `register_hook`.
        """
        if self._hooks is None:
            self._hooks = []
        hooks, entry = self._hooks, (hook, planned)
        hooks.append(entry)
        self.device.revision += 1

        def remove() -> None:
            if entry in hooks:
                hooks.remove(entry)
                self.device.revision += 1

        return remove

    def backward(self, gradient: Tensor | float | None = None, retain_graph: bool = False) -> None:
        """Add the gradients of this tensor to the `grad` of every leaf from which it was computed.

        Args:
            gradient: the gradient of this tensor itself: a tensor of its shape, or a number for every element; None: 1,
                for a tensor of one element.
            retain_graph: whether operations keep their tensors, for another backward().

        Raises:
            ArgumentError: no leaf needs a gradient, `gradient` does not fit, or the graph ran backward before.
        """
        Tensor._backward(self, gradient, retain_graph)

    def detach(self) -> Tensor:
        """Return a tensor on the same memory that is not on the tape."""
        detached = self.alias(self.shape)
        detached.whole_columns = self.whole_columns
        return detached

    def alias(self, shape: Shape) -> Tensor:
        """Return a tensor of another shape and as many elements, on the same memory, that is not on the tape."""
        return wrap(self.device, self.buffer, shape, self.dtype)


def from_dlpack(exporter: object, device: Device | str | None = None, *, copy: bool | None = None) -> Tensor:
    """Return a tensor of another library's, from its `__dlpack__`.

    Args:
        exporter: a float32 or int32 tensor in the host's memory.
        device: as for Tensor.
        copy: None: share the memory where the device can use it: a CPU device, and a contiguous tensor that can be
            written to and starts at a multiple of 128 bytes. False: raise ArgumentError where it cannot. True: copy.

    The memory lives as long as the tensor; it must not change while kernels use it.
    """
    array = array_from_dlpack(exporter)
    tensor = Tensor(array, device, copy=bool(copy))
    if copy is False and not tensor.device.lies_on(array, tensor.buffer):
        raise ArgumentError(
            "from_dlpack: expected a contiguous, writable tensor that starts at a multiple of 128 bytes, and a CPU "
            "device, with copy=False; use copy=None"
        )
    return tensor


def wrap(device: Device, buffer: Any, shape: Shape, dtype: np.dtype = FLOAT32) -> Tensor:
    """Return a tensor on a given buffer."""
    tensor = Tensor.__new__(Tensor)
    tensor.device = device
    tensor.buffer = buffer
    tensor.shape = shape
    tensor.dtype = dtype
    tensor._grad = tensor._node = tensor._hooks = None
    tensor._requires_grad = False
    tensor.whole_columns = 0
    return tensor


def empty(device: Device, shape: Shape, dtype: np.dtype = FLOAT32) -> Tensor:
    """Return an uninitialised tensor in pooled memory."""
    return wrap(device, device.allocate(max(math.prod(shape), 1) * _ELEMENT_BYTES), shape, dtype)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Queue a copy of the elements of one tensor to another of the same size; ArgumentError for another size."""
    device, size = target.device, target.numel()
    if source.numel() != size:
        raise ArgumentError(f"copy: expected {size} elements, as {target.shape} has, got {source.shape}")
    device.launch(device.kernel("elementwise", "copy"), *device.grid(size), target.buffer, source.buffer, size)


def _constant_key(value: float) -> tuple[str, str]:
    return "constant", repr(value)


_ONE = _constant_key(1.0)


def constant(device: Device, value: float) -> Tensor:
    """Return a tensor of shape () that holds `value`; its buffer is the device's, shared by all equal constants."""
    buffer = device.keep(_constant_key(value), lambda: np.array(value, FLOAT32))
    return wrap(device, buffer, ())


def is_one(tensor: Tensor) -> bool:
    """Return whether a tensor is the `constant` 1.0, from which backward() of a loss starts."""
    return tensor.buffer is tensor.device.kept.get(_ONE)


def whole_rows(name: str, x: Tensor) -> None:
    """Raise ArgumentError for a tensor whose rows are divided between ranks."""
    if x.whole_columns:
        raise ArgumentError(
            f"{name}: expected whole rows of {x.whole_columns} columns, got this rank's {x.shape[-1]}, of a "
            "ColumnParallel layer; use ColumnParallel(gather_output=True), or VocabularyParallelCrossEntropyLoss for "
            "a loss of parts"
        )


def float_tensor(name: str, value: object) -> Tensor:
    """Return `value` if it is a float32 tensor; else raise ArgumentError with the argument's name."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name}: expected a Tensor, got {type(value).__name__}; wrap arrays in Tensor(...)")
    if value.dtype is not FLOAT32 and value.dtype != FLOAT32:
        raise ArgumentError(
            f"{name}: expected a float32 tensor, got {value.dtype} of shape {value.shape}; x.float() is one"
        )
    return value


def _host_array(array_like: object) -> np.ndarray:
    if isinstance(array_like, Tensor):
        array_like = array_like.numpy()
    array = np.asarray(array_like)
    if array.dtype.kind == "b":
        array = array.astype(BOOL, order="C", copy=False)
    elif array.dtype.kind == "f":
        array = array.astype(FLOAT32, order="C", copy=False)
    elif array.dtype.kind in "iu":
        is_wider = array.dtype.itemsize >= 4 and array.dtype != INT32
        if is_wider and array.size and (array.max() > 2**31 - 1 or array.min() < -(2**31)):
            raise ArgumentError(f"Tensor: integers must fit int32, got values up to {array.max()}")
        array = array.astype(INT32, order="C", copy=False)
    else:
        raise ArgumentError(f"Tensor: expected numbers, got dtype {array.dtype}")
    if array.size > _MOST_ELEMENTS:
        raise ArgumentError(f"Tensor: expected at most 2**31 - 1 elements, got shape {array.shape}")
    return array


def _device(device: Device | str | None) -> Device:
    if device is None:
        return default_device()
    return device if isinstance(device, Device) else Device.select(device)
