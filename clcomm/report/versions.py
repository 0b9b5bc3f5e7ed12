"""Versions of a run's software, for its report."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import metadata

from clcomm._version import __version__
from clcomm.transport.mpi_runtime import library

#: Packages to report, where installed.
_DISTRIBUTIONS = ("numpy", "mpi4py", "pyopencl")


def versions() -> dict[str, str]:
    """Return the versions of clcomm, Python, the MPI library, and the packages that are installed."""
    found = {"clcomm": __version__, "Python": platform.python_version(), "MPI": library()}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):  # PyOpenCL is an extra
            found[name] = metadata.version(name)
    return found
