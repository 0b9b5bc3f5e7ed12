"""The flat arrays of a model on a device, and the host arrays that mirror them or that they lie on."""

from __future__ import annotations

from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.precision import FLOAT32, Precision
from clcomm.engine.device import HOST_POINTER_ALIGNMENT, Device
from clcomm.engine.stored_parameters import Storage


class FlatBuffers:
    """OpenCL buffers of `layout.span` bytes: parameters, gradients and averaged gradients.

    `reduced` is `grads` itself unless all three lie on top of host arrays and it has an array of its own. With
    `is_staged` the device's memory is separate from the host arrays, so that transfers copy.

    Parameters may be stored in a `precision` of 16 bits, at half the offset: `storage` then expands and rounds them.
    """

    def __init__(self, device: Device, layout: FlatLayout, params: np.ndarray):
        self.device, self.layout = device, layout
        self.params = device.memory.exact(copy_of=params)
        self.grads = self.reduced = device.memory.exact(copy_of=np.zeros_like(params))
        self.precision: Precision = FLOAT32
        self.storage: Storage | None = None
        self.is_staged = True
        self._host: dict[str, np.ndarray] | None = None

    @property
    def params_nbytes(self) -> int:
        """Bytes of the flat array of parameters, padding included."""
        return self.precision.nbytes(self.layout.span)

    def pull_params(self) -> None:
        """Bring the host's `params` array up to date."""
        if self.is_staged:
            self.device.read(self.params, self.host_array("params"))
        else:
            self.device.finish()

    def push_params(self) -> None:
        """Make the host's `params` array the device's parameters."""
        if self.is_staged:
            self.device.write(self.params, self.host_array("params"))
        else:
            self.device.finish()

    def _bind(self, params: np.ndarray, grads: np.ndarray, reduced: np.ndarray, gradients: np.ndarray) -> None:
        """Make buffers with the contents of `params` and `gradients`, on top of the host arrays where possible."""
        self._host = {"params": params, "grads": grads, "reduced": reduced}
        on_top = self.device.shares_host_memory and _are_aligned(params, grads, reduced) and self._sees_writes(grads)
        grads[...] = gradients
        self.params, self.grads = self._buffer(params, on_top), self._buffer(grads, on_top)
        is_third = on_top and reduced.ctypes.data != grads.ctypes.data  # one rank alone has one array for both
        self.reduced = self._buffer(reduced, on_top) if is_third else self.grads
        self.is_staged = not on_top

    def _buffer(self, array: np.ndarray, on_top: bool) -> Any:
        memory = self.device.memory
        return memory.exact(on_top_of=array) if on_top else memory.exact(copy_of=array)

    def _sees_writes(self, array: np.ndarray) -> bool:
        """Return whether a kernel's writes to a buffer on top of `array` appear in it without a copy."""
        device, buffer = self.device, self._buffer(array, on_top=True)
        array[-4:] = 255
        count = array.nbytes // 4
        device.launch(device.kernel("elementwise", "fill"), *device.grid(count), buffer, 0.0, count)
        device.finish()
        return not array[-4:].any()

    @staticmethod
    def _check_host_array(name: str, array: np.ndarray, nbytes: int) -> None:
        if array.dtype != np.uint8 or array.shape != (nbytes,) or not array.flags.c_contiguous:
            expected = f"{nbytes} contiguous uint8"
            raise ArgumentError(f"{name}: expected {expected}, got {array.dtype} of shape {array.shape}")

    def reduces_into(self, reduced: np.ndarray) -> bool:
        """Return whether the host's array of averaged gradients is this memory."""
        return self._host is not None and self._host["reduced"].ctypes.data == reduced.ctypes.data

    def host_array(self, name: str) -> np.ndarray:
        """Return the host's array of "params", "grads" or "reduced"; ArgumentError before there are any."""
        if self._host is None:
            raise ArgumentError("FlatSpace: no host arrays yet; call rebind() first")
        return self._host[name]

    def _drop_host_arrays(self, *names: str) -> None:
        if self._host is not None:
            self._host = {name: array for name, array in self._host.items() if name not in names}

    def read_grads(self, start: int, stop: int) -> None:
        """Copy bytes [start, stop) of the gradients to the host's array."""
        self.device.read(self.grads, self.host_array("grads")[start:stop], start)

    def write_grads(self, start: int, stop: int, source: str) -> None:
        """Copy bytes [start, stop) of the host's array `source` to the gradients."""
        self.device.write(self.grads, self.host_array(source)[start:stop], start)


def _are_aligned(*arrays: np.ndarray) -> bool:
    return all(array.ctypes.data % HOST_POINTER_ALIGNMENT == 0 for array in arrays)
