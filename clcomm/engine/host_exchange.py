"""Tensors as host arrays on the same memory, for NumPy, PyTorch and others: DLPack and NumPy's array interface."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import HANDED_OUT, host_array

if TYPE_CHECKING:
    from clcomm.engine.device import Device


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
