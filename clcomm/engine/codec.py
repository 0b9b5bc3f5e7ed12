"""Coding and decoding of compressed gradients by a rank's own device, in host memory: codec.cl and factors.cl."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clcomm.base.host.arrays import WORD, aligned_empty
from clcomm.engine.device import Device
from clcomm.engine.host_kernels import HostKernels, HostLaunch
from clcomm.engine.program import Kernel

#: Elements that share a scale; codec.cl has the same number.
BLOCK = 256


class DeviceCodec:
    """Prepares the coding and decoding of float32 on a device that computes in the host's memory.

    Its methods are named as the functions of `clcomm.sync.compression.coding`; results have the same bits as these.
    """

    def __init__(self, device: Device):
        self._device, self._kernels = device, HostKernels(device)

    @classmethod
    def on(cls, device: Device) -> DeviceCodec | None:
        """Return a DeviceCodec; None for a device with memory of its own."""
        return cls(device) if device.is_cpu else None

    def to_halves(self, values: np.ndarray, halves: np.ndarray, divisor: int) -> Callable[[], None] | None:
        return self._prepare("to_halves", values, halves, float(divisor), count=values.size)

    def from_halves(self, halves: np.ndarray, values: np.ndarray) -> Callable[[], None] | None:
        return self._prepare("from_halves", halves, values, count=values.size)

    def to_bfloat16(self, values: np.ndarray, halves: np.ndarray, divisor: int) -> Callable[[], None] | None:
        return self._prepare("to_bfloat16", values, halves, float(divisor), count=values.size)

    def from_bfloat16(self, halves: np.ndarray, values: np.ndarray) -> Callable[[], None] | None:
        return self._prepare("from_bfloat16", halves, values, count=values.size)

    def to_chars(
        self, values: np.ndarray, residual: np.ndarray, rows: np.ndarray, row: int
    ) -> Callable[[], None] | None:
        return self._prepare("to_chars", values, residual, rows, row * rows.shape[1], count=values.size, group=BLOCK)

    def mean_of_chars(self, rows: np.ndarray, out: np.ndarray) -> Callable[[], None] | None:
        return self._prepare("mean_of_chars", rows, out, len(rows), count=out.size, group=BLOCK)

    def to_largest(
        self, values: np.ndarray, residual: np.ndarray, rows: np.ndarray, row: int
    ) -> Callable[[], None] | None:
        first, chosen = row * rows.shape[1], rows.shape[1] // 8
        return self._prepare("to_largest", values, residual, rows, first, chosen, count=values.size, group=values.size)

    def mean_of_largest(self, rows: np.ndarray, out: np.ndarray) -> Callable[[], None] | None:
        total, chosen = aligned_empty(out.shape, out.dtype), rows.shape[1] // 8
        return self._prepare("mean_of_largest", rows, out, total, len(rows), chosen, count=out.size, group=out.size)

    def times(self, matrix: np.ndarray, factor: np.ndarray, thin: np.ndarray) -> Callable[[], None] | None:
        rows, columns = matrix.shape
        return self._prepare("times", matrix, factor, thin, len(factor), columns, count=rows, file="factors")

    def transposed_times(self, matrix: np.ndarray, factor: np.ndarray, thin: np.ndarray) -> Callable[[], None] | None:
        rows, columns = matrix.shape
        return self._prepare("transposed_times", matrix, factor, thin, len(factor), rows, count=columns, file="factors")

    def outer(self, first: np.ndarray, second: np.ndarray, matrix: np.ndarray) -> Callable[[], None] | None:
        rows, columns = matrix.shape
        return self._prepare("outer", first, second, matrix, len(first), columns, count=rows, file="factors")

    def _prepare(
        self, name: str, *arguments: object, count: int, group: int = 1, file: str = "codec"
    ) -> Callable[[], None] | None:
        """Prepare one kernel over `count` elements, whole groups of `group` elements per work-item.

        None for arrays that the device cannot compute on in place, and for floats other than float32.
        """
        arrays = [each for each in arguments if isinstance(each, np.ndarray)]
        floats = [each for each in arrays if each.dtype.kind == "f" and each.itemsize != 2]
        if not all(map(self._kernels.takes, arrays)) or any(each.dtype != np.float32 for each in floats):
            return None

        def launches() -> list[HostLaunch]:
            (items,), local = self._device.grid(count)
            sizes = (min(items, -(-count // group)),), local
            return [HostLaunch(_kernel(self._device, file, name), [*arguments, count], sizes)]

        return self._kernels.prepare(launches)


def _kernel(device: Device, file: str, name: str) -> Kernel:
    return device.kernel(file, name, fast_math=name == "times")


def rehearse(device: Device, scheme: str) -> None:
    """Launch the kernels of a scheme of `clcomm.sync.compression`, given by name, on uninitialised memory."""
    if not device.is_cpu:
        return
    values, halves, row = (device.allocate(4 * (BLOCK + 4)) for _ in range(3))
    kernels: dict[str, list[tuple[str, tuple[object, ...]]]] = {
        "fp16": [
            ("to_halves", (values, halves, 1.0)), ("add_halves", (halves, values)),
            ("from_halves", (halves, values)),
        ],
        "bf16": [
            ("to_bfloat16", (values, halves, 1.0)), ("from_bfloat16", (halves, values)),
            ("add_bfloat16", (halves, values)),
        ],
        "int8": [("to_chars", (values, halves, row, 0)), ("mean_of_chars", (row, values, 1))],
        "powersgd": [
            ("times", (values, halves, row, 1, 1)), ("transposed_times", (values, halves, row, 1, 1)),
            ("outer", (values, halves, row, 1, 1)),
        ],
        "topk": [("to_largest", (values, halves, row, 0, 1)), ("mean_of_largest", (row, values, halves, 1, 1))],
    }  # fmt: skip
    file = "factors" if scheme.startswith("powersgd") else "codec"
    for name, arguments in kernels.get(scheme.partition(":")[0], []):
        device.launch(_kernel(device, file, name), *device.grid(1), *arguments, 1)


# --- The hash of clcomm/base/host/arrays.py, computed on a device by hash.cl. ---


def hash_buffer(device: Device, buffer: object, nbytes: int) -> int:
    """Return the hash of the first `nbytes` of a buffer, a multiple of WORD; waits for the device."""
    grid = device.grid(nbytes // WORD)
    (units,) = grid[0]
    partials = device.allocate(units * WORD)
    device.launch(device.kernel("hash", "hash_words"), *grid, partials, buffer, units, nbytes // WORD)
    sums = np.empty(units, np.uint64)
    device.read(partials, sums)
    return int(np.add.reduce(sums))
