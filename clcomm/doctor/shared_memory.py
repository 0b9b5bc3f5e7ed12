"""/dev/shm and the window that the ranks of a host share in it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from clcomm.doctor.finding import Finding, note, ok, problem
from clcomm.doctor.job import FAILED, Facts, Job
from clcomm.units import format_size

#: Less room is not enough for a job's ranks at all; with less than the second only small models fit.
LEAST_BYTES, AMPLE_BYTES = 4 << 20, 256 << 20
_ENLARGE = "enlarge it: docker run --shm-size=1g, or mount -o remount,size=2G /dev/shm"


def probe() -> dict[str, object]:
    """Return the size of /dev/shm and its free room; "reason": why it can't be written to."""
    found: dict[str, object] = {"bytes": 0, "free": 0, "reason": ""}
    try:
        room = os.statvfs("/dev/shm")
        found |= {"bytes": room.f_blocks * room.f_frsize, "free": room.f_bavail * room.f_frsize}
        if not os.access("/dev/shm", os.W_OK):
            found["reason"] = "it is not writable"
    except OSError as error:
        found["reason"] = error.strerror
    return found


def is_too_small(facts: Facts) -> bool:
    """Return whether MPI has no room for its own files, so that a rank that starts it ends by SIGBUS."""
    return FAILED not in facts and facts["bytes"] > 0 and facts["free"] < LEAST_BYTES


def check(job: Job) -> Iterator[Finding]:
    """Judge the room on each host, and whether its ranks share a window."""
    for where, facts in job.by_host("shared memory"):
        shown = f"{format_size(facts['free'])} of {format_size(facts['bytes'])} free{where}"
        if facts["reason"]:
            what = f"{facts['reason']}{where}: ranks reduce through MPI"
            yield problem("/dev/shm", what, "mount a tmpfs there, writable by all (mode 1777)", **facts)
        elif facts["free"] < LEAST_BYTES:
            yield problem(
                "/dev/shm", f"full: {shown}: MPI ends its ranks by SIGBUS",
                f"{_ENLARGE}; ls -l /dev/shm shows what fills it", **facts,
            )  # fmt: skip
        elif facts["free"] < AMPLE_BYTES:
            yield note("/dev/shm", f"{shown}: room for small models alone", _ENLARGE, **facts)
        else:
            yield ok("/dev/shm", shown, **facts)
    yield from _window(job)


def _window(job: Job) -> Iterator[Finding]:
    found = [(where, facts["window"]) for where, facts in job.by_host("world") if "window" in facts]
    found += [(where, facts["window"]) for where, facts in job.by_host("start") if "window" in facts]
    for where, shares in found:
        if shares:
            yield ok("window", f"the ranks of a host share memory{where}")
        else:
            yield problem(
                "window", f"MPI offers its ranks no shared memory{where}: gradients are copied through MPI",
                "make room in /dev/shm; with Open MPI unset OMPI_MCA_osc=^sm (docs/mpi.md)",
            )  # fmt: skip
