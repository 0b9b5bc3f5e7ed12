"""Anonymous memory shared by the processes of a host.

Unlike an MPI window it exists for as long as any process uses it, independently of MPI.
"""

from __future__ import annotations

import mmap
import os
from typing import Any


def common_memory(host: Any, name: str, nbytes: int) -> tuple[memoryview | None, int]:
    """Return `nbytes` zeroed bytes shared by all ranks of `host`, and their descriptor on rank 0, else -1; collective.

    The memory is None on every rank if one cannot map it. The caller closes the descriptor.
    """
    descriptor = _make(name, nbytes) if host.Get_rank() == 0 else -1
    path = host.bcast(f"/proc/{os.getpid()}/fd/{descriptor}" if descriptor >= 0 else "", 0)
    memory = _open(path, nbytes) if path else None
    everyone = all(host.allgather(memory is not None))
    return (memory if everyone else None), descriptor


def _make(name: str, nbytes: int) -> int:
    try:
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, nbytes)
    except (OSError, AttributeError):
        return -1
    return descriptor


def _open(path: str, nbytes: int) -> memoryview | None:
    try:
        with open(path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), nbytes))
    except OSError:
        return None
