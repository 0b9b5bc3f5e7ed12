"""Versions of what computes and communicates: the same on every rank."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from clcomm._version import __version__
from clcomm.doctor.finding import Finding, note, ok, problem
from clcomm.doctor.job import Job
from clcomm.errors import name_ranks

#: Packages whose versions matter, as they are called here and in their metadata.
_PACKAGES = {"NumPy": "numpy", "mpi4py": "mpi4py", "PyOpenCL": "pyopencl", "PoCL": "pocl-binary-distribution"}
#: How many numbers of a version have to be equal for a job to start (clcomm/same_start.py).
_REQUIRED = {"clcomm": 9, "Python": 2, "NumPy": 2, "mpi4py": 1}
_REMEDY = "install the same versions for all ranks, for instance from one requirements file: pip install -r"


def probe() -> dict[str, object]:
    """Return versions by name; "none" for a package that is not installed."""
    found = {"clcomm": __version__, "Python": platform.python_version(), "machine": os.uname().machine}
    for name, package in _PACKAGES.items():
        found[name] = "none"
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(package)
    return {"versions": found, "byte order": sys.byteorder}


def check(job: Job) -> Iterator[Finding]:
    """Compare the ranks' versions, as a job does when it starts."""
    found = job.of("versions")
    everyone = {rank: facts["versions"] for rank, facts in found.items()}
    if not everyone:
        return
    names = list(next(iter(everyone.values())))
    differing = False
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, versions in everyone.items():
            ranks.setdefault(versions.get(name, "none"), []).append(rank)
        if len(ranks) == 1:
            continue
        differing = True
        values = ", ".join(f"{version} on {name_ranks(own)}" for version, own in ranks.items())
        numbers = _REQUIRED.get(name)
        stops = numbers is not None and len({tuple(version.split(".")[:numbers]) for version in ranks}) > 1
        what = f"{name}: {values}" + ("; such a job does not start" if stops else "")
        yield (problem if stops else note)("versions", what, _REMEDY, versions=dict(ranks))
    if not differing:
        first = next(iter(everyone.values()))
        shown = ", ".join(f"{name} {version}" for name, version in first.items() if name != "machine")
        yield ok("versions", f"{shown}; {first['machine']}", versions=first)
