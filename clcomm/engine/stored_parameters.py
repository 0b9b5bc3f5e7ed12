"""Parameters stored in 16 bits: kernels read float32 copies that live as long as their launches. See stored.cl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.precision import FP16, Precision
from clcomm.engine.device import Device
from clcomm.engine.parameter import LazyParameter

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class StoredParameter(LazyParameter):
    """A parameter stored in 16 bits by its flat space."""

    __slots__ = ()
    exports_copy = True

    @property
    def buffer(self) -> Any:
        """A new float32 buffer of the values at each access; kernels' writes to it are lost."""
        return self.slot.space.expanded(self)  # type: ignore[union-attr]

    def copy_from(self, array_like: ArrayLike) -> None:
        """Overwrite the values with a host array of the same shape, rounded as it is stored; waits for the queue."""
        array = np.ascontiguousarray(array_like, self.dtype).reshape(np.shape(array_like))
        if array.shape != self.shape:
            raise ArgumentError(f"copy_from: expected an array of shape {self.shape}, got {array.shape}")
        self.slot.space.narrow(self, array)  # type: ignore[union-attr]
        self.note_write()

    def _as_host_array(self) -> np.ndarray:
        """Return a copy, as no float32 memory exists to share."""
        return self.numpy().copy()


class Storage:
    """Moves parameters between float32 and a precision of 16 bits, on a device; offsets and counts are elements.

    Raises ArgumentError for fp16 on a device without half precision.
    """

    def __init__(self, device: Device, precision: Precision):
        if precision is FP16 and not device.has_half:
            raise ArgumentError(
                f"precision: expected bf16 or float32 on {device.name}, whose half_fp_config is 0 (no cl_khr_fp16), "
                f"got {precision}"
            )
        self._device = device
        self._defines: dict[str, Any] = {"FP16": 1} if precision is FP16 else {}

    def expand(self, stored: object, values: object, first: int, count: int) -> None:
        """Queue: values[:count] = stored[first : first + count]."""
        self._launch("expand", count, stored, values, first)

    def narrow(self, stored: object, values: object, first: int, first_value: int, count: int) -> None:
        """Queue: stored[first :] = values[first_value :], rounded to nearest, ties to even."""
        self._launch("narrow", count, stored, values, first, first_value)

    def narrowed(self, values: np.ndarray) -> np.ndarray:
        """Return values as they are stored, uint16; waits for the queue."""
        stored = self._device.allocate(2 * values.size)
        self.narrow(stored, self._device.upload(np.ascontiguousarray(values, np.float32)), 0, 0, values.size)
        bits = np.empty(values.size, np.uint16)
        self._device.read(stored, bits)
        return bits

    def reconcile(self, stored: object, masters: object, first: int, first_master: int, count: int) -> None:
        """Queue: each master that does not round to its stored value becomes that value."""
        self._launch("reconcile", count, stored, masters, first, first_master)

    def _launch(self, name: str, count: int, *args: object) -> None:
        device = self._device
        device.launch(device.kernel("stored", name, **self._defines), *device.grid(count), *args, count)
