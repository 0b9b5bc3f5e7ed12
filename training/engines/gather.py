"""Batches of normalised images, gathered by a rank's own device from a set in host memory: gather.cl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.base.host.arrays import aligned_empty
from clcomm.engine.device import HOST_POINTER_ALIGNMENT, Device
from clcomm.engine.host_kernels import HostKernels, HostLaunch
from clcomm.engine.program import Kernel

#: The file, as `Device.kernel` takes it.
SOURCE = "common\n" + Path(__file__).with_suffix(".cl").read_text(encoding="utf-8")


class DeviceGather:
    """Prepares batches of uint8 images, on a device that runs kernels in the calling thread."""

    def __init__(self, device: Device):
        self._device, self._kernels = device, HostKernels(device)

    @classmethod
    def on(cls, device: Device) -> DeviceGather | None:
        """Return a DeviceGather; None where NumPy is as good: where a thread gathers ahead, or memory is copied."""
        return cls(device) if device.runs_in_caller else None

    def __call__(
        self, pixels: np.ndarray, scale: np.ndarray, shift: np.ndarray, out: np.ndarray
    ) -> Callable[[np.ndarray], None] | None:
        """Return a function that writes `pixels[indices] * scale + shift` to `out`, with the same bits as NumPy.

        Its argument are indices, as many as `out` has images, which the caller has checked.

        Args:
            pixels: uint8 (N, C, H, W).
            scale, shift: float32, () or (C, 1, 1).
            out: float32 (B, C, H, W).

        Returns None for arrays that are not aligned or of another dtype, and where the device raises an error.
        """
        at = pixels.__array_interface__["data"][0]
        if pixels.dtype != np.uint8 or at % HOST_POINTER_ALIGNMENT or not self._kernels.takes(out):
            return None
        if pixels.nbytes > self._device.cl_device.max_mem_alloc_size or not pixels.flags.c_contiguous:
            return None
        planes = scale.size
        chosen = aligned_empty((len(out),), np.int32)
        chosen[...] = 0
        factors, added = (_aligned(each) for each in (scale, shift))
        plane = out[0].size // planes
        arguments = [pixels, chosen, factors, added, out, len(pixels), planes, plane, len(out)]
        launch = HostLaunch(_kernel(self._device), arguments)
        run = self._kernels.prepare(lambda: [launch])
        if run is None:
            return None

        def gather(indices: np.ndarray) -> None:
            chosen[...] = indices
            run()

        return gather


def _aligned(values: np.ndarray) -> np.ndarray:
    copy = aligned_empty((values.size,), np.float32)
    copy[...] = values.reshape(-1)
    return copy


def rehearse(device: Device) -> None:
    """Launch the kernel on uninitialised buffers, to build it."""
    if device.runs_in_caller:
        memory = device.allocate(4)
        device.launch(_kernel(device), (1,), (1,), *[memory] * 5, 1, 1, 1, 1)


def _kernel(device: Device) -> Kernel:
    options: dict[str, Any] = {"IN_CALLER": 1} if device.runs_in_caller else {}
    return device.kernel(SOURCE, "gather_pixels", **options)
