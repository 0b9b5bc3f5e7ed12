"""Anonymous memory shared by the processes of a host: it has no name, and exists for as long as any of them uses it."""

from __future__ import annotations

import mmap
import os
from typing import Any


def common_memory(host: Any, name: str, nbytes: int) -> tuple[memoryview | None, int]:
    """Return `nbytes` zeroed bytes shared by all ranks of `host`, and their descriptor on rank 0, else -1; collective.

    The memory is None on every rank if any rank cannot map it. The caller closes the descriptor.

    Args:
        host: a communicator of ranks of one host, or a Meeting of `memory_comm.py`.
        name: the file's name in /proc, for debugging (memfd_create(2)).
        nbytes: the same on all ranks.
    """
    descriptor = _make(name, nbytes) if host.Get_rank() == 0 else -1
    path = host.bcast(f"/proc/{os.getpid()}/fd/{descriptor}" if descriptor >= 0 else "", 0)
    memory = _open(path, nbytes) if path else None
    all_mapped = all(host.allgather(memory is not None))
    return (memory if all_mapped else None), descriptor


def _make(name: str, nbytes: int) -> int:
    try:
        descriptor = os.memfd_create(name)
    except (OSError, AttributeError):
        return -1
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _open(path: str, nbytes: int) -> memoryview | None:
    try:
        with open(path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), nbytes))
    except OSError:
        return None
