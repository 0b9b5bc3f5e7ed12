"""Addresses of buffers in the host's memory: what prepared launches take where a launch costs as much as its work.

PoCL counts, locks and checks each buffer among a kernel's arguments at every launch, and copies the address of shared
virtual memory (OpenCL 2.0, section 5.9.2) as it does a number. With addresses a launch takes a tenth less time.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyopencl as cl

    from clcomm.engine.launch_queue import LaunchQueue


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


def argument(device: LaunchQueue, value: Any) -> Any:
    """Return what a kernel's argument is set to for `value`: a buffer's address if the device takes it, else `value`.

    The caller keeps the buffer for as long as the kernel is launched.
    """
    import pyopencl as cl

    if not device.takes_addresses or not isinstance(value, cl.MemoryObjectHolder):
        return value
    return cl.SVM(np.frombuffer((ctypes.c_char * value.size).from_address(_address_of(device, value)), np.uint8))


def _address_of(device: LaunchQueue, buffer: cl.MemoryObjectHolder) -> int:
    import pyopencl as cl

    access = cl.map_flags.READ | cl.map_flags.WRITE
    with device.in_turn:
        mapped, _ = cl.enqueue_map_buffer(device.queue, buffer, access, 0, (buffer.size,), np.uint8)
        address: int = mapped.ctypes.data
        mapped.base.release(device.queue)
    return address
