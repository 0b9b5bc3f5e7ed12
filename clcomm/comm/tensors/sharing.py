"""Shared memory for tensors, which the ranks of a host read and write in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

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
