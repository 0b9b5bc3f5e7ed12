"""Host arrays that an OpenCL device can use in place, and the memory that a host has for them."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from clcomm.errors import ArgumentError
from clcomm.units import format_size

#: A page: more than the alignment that any OpenCL device needs to use host memory in place.
PAGE = 4096
#: Files with the memory limit of a container's processes (cgroup v2, v1).
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Return an uninitialised C-contiguous array that starts at a page boundary."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    raw = np.empty(nbytes + PAGE, np.uint8)
    start = -raw.__array_interface__["data"][0] % PAGE  # six times as fast as raw.ctypes.data
    return raw[start : start + nbytes].view(kind).reshape(shape)


def aligned_zeros(nbytes: int) -> np.ndarray:
    """Return zeroed bytes that start at a page boundary."""
    array = aligned_empty((nbytes,), np.uint8)
    array[...] = 0
    return array


def host_bytes() -> int:
    """Return the bytes of memory of this host, or of the container that this process runs in if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            found.append(int(Path(path).read_text()))
    return min(found)


def require_memory(name: str, value: object, nbytes: int, ranks: int) -> None:
    """Raise ArgumentError if this host lacks memory for `nbytes` on each of its ranks.

    Args:
        name: the option to name in the message.
        value: the option's value.
        nbytes: bytes that a rank takes with this value.
        ranks: number of ranks on this host.
    """
    if nbytes * ranks > host_bytes():
        several = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ArgumentError(
            f"{name}: expected a value whose memory this host has, got {value}, which takes {format_size(nbytes)}"
            f"{several} of {format_size(host_bytes())}"
        )
