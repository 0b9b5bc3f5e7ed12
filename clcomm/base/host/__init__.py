"""The host that a process runs on: the cores and the memory that it may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from clcomm.base.errors import ArgumentError
from clcomm.base.units import format_size

#: Files with the memory limit of a container's processes (cgroup v2, v1).
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def usable_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on: its affinity mask, where supported."""
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0) if affinity else range(os.cpu_count() or 1))


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
