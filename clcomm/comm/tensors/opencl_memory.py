"""Tensors of pytorch_ocl, PyTorch's OpenCL device, in the host's memory: mapped where the device shares it.

The address of such a tensor's storage is its cl_mem, which PyOpenCL maps through a queue of its own.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch

#: The name that pytorch_ocl gives its device.
DEVICE = "ocl"
#: Addresses of storages that are mapped, by the cl_mem.
_mapped: dict[int, int] = {}


def mapped(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's own memory as one of the host, until that is dropped; None: the device shares none.

    The device may not use the tensor meanwhile: what it has queued is completed first.
    """
    cl = _pyopencl()
    if cl is None or not tensor.is_contiguous() or not tensor.numel():
        return None
    memory = tensor.untyped_storage().data_ptr()
    buffer = cl.Buffer.from_int_ptr(memory)
    if memory in _mapped or not all(each.host_unified_memory for each in buffer.context.devices):
        return None
    torch.get_device_module(tensor.device).synchronize(tensor.device)
    queue, flags = cl.CommandQueue(buffer.context), cl.map_flags.READ | cl.map_flags.WRITE
    first = tensor.storage_offset() * tensor.itemsize
    array, _ = cl.enqueue_map_buffer(queue, buffer, flags, first, (tensor.nbytes,), "u1")
    _mapped[memory] = array.ctypes.data
    weakref.finalize(array, _unmap, memory, array.base, queue)
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)


def _unmap(memory: int, mapping: Any, queue: Any) -> None:
    mapping.release(queue)
    queue.finish()  # as the device's own queue does not wait for this one
    del _mapped[memory]


def is_mapped(values: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether values on the host are a tensor's own memory."""
    return _mapped.get(tensor.untyped_storage().data_ptr()) == values.data_ptr()


@cache
def _pyopencl() -> Any:
    try:
        import pyopencl
    except ImportError:
        return None
    return pyopencl
