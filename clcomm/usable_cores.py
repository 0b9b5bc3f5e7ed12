"""The cores that this process may run on."""

from __future__ import annotations

import os


def usable_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on: its affinity mask, where supported."""
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0) if affinity else range(os.cpu_count() or 1))
