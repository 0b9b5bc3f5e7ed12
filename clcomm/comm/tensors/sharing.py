"""Shared memory for tensors, which the ranks of a host read and write in place."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors.private_torch import (
    WeakStorage,
    share_storage,
    storage_address,
    storage_of_address,
    storage_use_count,
)
from clcomm.comm.transport.mapped_files import MappedFile

#: Smaller buffers stay where they are: small arrays are copied into slots in any case.
LEAST_BYTES = 64 << 10
#: Ranks compare persistent buffers after 1, 2, 4, ... further collectives, and at last after each so many.
_COMPARED_EVERY = 32
#: Weak references to buffers that may be gone, before these are dropped.
_MOST_SEEN = 256


class PersistentBuffers:
    """Finds persistent buffers, those reduced in several backwards, such as DistributedDataParallel's, and moves them.

    A buffer is persistent if a second backward reduces the same storage. Each rank finds its own. Before the move ranks
    compare their sizes, at some of the all-reduces. The Communicator's number of collectives says at which: ranks have
    the same one, also after an error.

    Attributes:
        due: the number of collectives after which an all-reduce is to call `move`.
    """

    def __init__(self, comm: Communicator):
        self._comm = comm
        self.due, self._pause = 0, 1  # the pause is added to it
        self._seen: dict[int, WeakStorage] = {}
        self._lasting: dict[int, WeakStorage] = {}
        # PyTorch's own variable: whether buckets may be in a backend's memory.
        self._wanted = os.environ.get("DDP_DISABLE_COMM_MEM", "0") != "1"

    def note(self, tensor: torch.Tensor) -> None:
        """Note a tensor that a backward reduces."""
        if not self._wanted or tensor.nbytes < LEAST_BYTES:
            return
        storage = tensor.untyped_storage()
        if not _is_movable(storage) or storage.is_shared() or tensor.nbytes != storage.nbytes():
            return
        key = storage_address(storage)
        if key in self._seen:
            self._lasting.setdefault(key, self._seen[key])
            return
        if len(self._seen) >= _MOST_SEEN:
            self._seen = {key: seen for key, seen in self._seen.items() if not seen.expired()}
        self._seen[key] = WeakStorage(storage)

    def move(self, purpose: str) -> None:
        """Compare persistent buffers' sizes with the other ranks', and move them to shared memory, where that is due.

        purpose: the all-reduce's name in messages, the same on every rank.
        """
        done = self._comm.runner.sequence
        lasting, self._lasting = self._lasting, {}
        found = [storage_of_address(each.cdata) for each in lasting.values()]
        storages = [storage for storage in found if storage is not None and _is_movable(storage)]
        if self._comm.memory.adopt([each.nbytes() for each in storages], partial(_mapped, storages), purpose=purpose):
            for storage in storages:
                del self._seen[storage_address(storage)]
        # Behind what raises errors: then ranks that were elsewhere are due at the same number as this one.
        self.due, self._pause = done + self._pause, min(2 * self._pause, _COMPARED_EVERY)


def share(comm: Communicator, tensors: Sequence[torch.Tensor]) -> bool:
    """Move the storages of these tensors; see `clcomm.torch.share`."""
    storages: dict[int, torch.UntypedStorage] = {}
    for index, tensor in enumerate(tensors):
        problem = _problem(tensor, comm.shares_memory)
        if problem:
            comm.runner.refuse(f"tensors[{index}]: expected {problem}")
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages.setdefault(storage_address(storage), storage)
    return comm.memory.adopt(
        [each.nbytes() for each in storages.values()],
        partial(_mapped, list(storages.values())),
        purpose="share",
        require_equal=True,
    )


def _problem(tensor: torch.Tensor, moves: bool) -> str:
    """Return the requirement that a tensor fails, which is then not moved; "": none, or if nothing moves."""
    if not isinstance(tensor, torch.Tensor):
        return f"a tensor, got {type(tensor).__name__}"
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return f"a dense tensor on cpu, got {tensor.layout} on {tensor.device}"
    if moves and not _is_movable(tensor.untyped_storage()):
        return "memory of PyTorch's own, got memory that NumPy or another library uses; use clone()"
    return ""


def _is_movable(storage: torch.UntypedStorage) -> bool:
    """Return whether only tensors know the storage's address: PyTorch fixes the size of others."""
    return (storage.resizable() or storage.is_shared()) and storage.filename is None


def _mapped(storages: Sequence[torch.UntypedStorage]) -> list[MappedFile]:
    """Move storages into files without names, which PyTorch maps, as for `torch.multiprocessing`."""
    files = []
    for storage in storages:
        descriptor, nbytes = share_storage(storage)
        torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # fixes the size: resizing would move it away
        files.append(MappedFile(descriptor, storage.data_ptr(), nbytes, partial(_is_used, storage)))
    return files


def _is_used(storage: torch.UntypedStorage) -> bool:
    return storage_use_count(storage_address(storage)) > 1


# --- Tensors of pytorch_ocl, PyTorch's OpenCL device, in the host's memory: mapped where the device shares it. ---
# The address of such a tensor's storage is its cl_mem, which PyOpenCL maps through a queue of its own.

#: The name that pytorch_ocl gives its device.
DEVICE = "ocl"
#: Addresses of storages that are mapped, by the cl_mem.
_mapped_of_opencl_memory: dict[int, int] = {}


def mapped(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's own memory as one of the host, until that is dropped; None: the device shares none.

    The device may not use the tensor meanwhile: what it has queued is completed first.
    """
    cl = _pyopencl()
    if cl is None or not tensor.is_contiguous() or not tensor.numel():
        return None
    memory = tensor.untyped_storage().data_ptr()
    buffer = cl.Buffer.from_int_ptr(memory)
    if memory in _mapped_of_opencl_memory or not all(each.host_unified_memory for each in buffer.context.devices):
        return None
    torch.get_device_module(tensor.device).synchronize(tensor.device)
    queue, flags = cl.CommandQueue(buffer.context), cl.map_flags.READ | cl.map_flags.WRITE
    first = tensor.storage_offset() * tensor.itemsize
    array, _ = cl.enqueue_map_buffer(queue, buffer, flags, first, (tensor.nbytes,), "u1")
    _mapped_of_opencl_memory[memory] = array.ctypes.data
    weakref.finalize(array, _unmap, memory, array.base, queue)
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)


def _unmap(memory: int, mapping: Any, queue: Any) -> None:
    mapping.release(queue)
    queue.finish()  # as the device's own queue does not wait for this one
    del _mapped_of_opencl_memory[memory]


def is_mapped(values: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether values on the host are a tensor's own memory."""
    return _mapped_of_opencl_memory.get(tensor.untyped_storage().data_ptr()) == values.data_ptr()


@cache
def _pyopencl() -> Any:
    try:
        import pyopencl
    except ImportError:
        return None
    return pyopencl
