"""Addresses of host buffers as kernel arguments, for launches that cost as much as their work.

PoCL counts, locks and checks each buffer among a kernel's arguments at every launch, and copies the address of shared
virtual memory (OpenCL 2.0, section 5.9.2) as it does a number. With addresses a launch takes less time.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import pyopencl as cl


class _Device(Protocol):
    takes_addresses: bool

    def host_address(self, buffer: object, nbytes: int) -> int: ...


def are_taken(cl_device: cl.Device) -> bool:
    """Return whether kernels take the address at which a buffer of this CPU device lies.

    PoCL's driver without worker threads: its buffers lie in the host's memory, at one address for as long as they live.
    A launch is over when it returns, so nothing else has to keep that memory until then.
    """
    import pyopencl as cl

    if not cl_device.name.startswith("basic"):
        return False
    try:
        return bool(cl_device.svm_capabilities & cl.device_svm_capabilities.FINE_GRAIN_BUFFER)
    except cl.Error:  # before OpenCL 2.0
        return False


def argument(device: _Device, value: object) -> Any:
    """Return the kernel argument for `value`: a buffer's address if the device takes it, else `value`.

    The caller keeps the buffer for as long as the kernel is launched.
    """
    import pyopencl as cl

    if not device.takes_addresses or not isinstance(value, cl.MemoryObjectHolder):
        return value
    memory = (ctypes.c_char * value.size).from_address(device.host_address(value, value.size))
    return cl.SVM(np.frombuffer(memoryview(memory), np.uint8))


def kept_argument(device: _Device, buffer: Any) -> Any:
    """Return `argument` for a buffer of exact size, which keeps it for the next time; other values as they are."""
    if not device.takes_addresses:
        return buffer
    kept = getattr(buffer, "argument", buffer)
    if kept is None:
        kept = buffer.argument = argument(device, buffer)
    return kept
