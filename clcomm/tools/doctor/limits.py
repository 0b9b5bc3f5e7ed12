"""Limits of a process (open files, sizes of files), and the room in the temporary directory and in /dev/shm."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator

from clcomm.base.console.finding import Finding, note, ok, problem
from clcomm.base.units import format_size
from clcomm.tools.doctor.job import FAILED, Facts, JobFacts

#: Open files: MPI does not start with less; hundreds of ranks and PyTorch's workers need more than the second.
LEAST_OPEN, AMPLE_OPEN = 64, 256
#: Bytes of a file: no kernel can be stored with less; a checkpoint may be larger than the second.
LEAST_FILE, AMPLE_FILE = 1 << 20, 1 << 30
#: Room in the temporary directory, as for files.
LEAST_ROOM, AMPLE_ROOM = 4 << 20, 64 << 20
#: Less room is not enough for a job's ranks at all; with less than the second only small models fit.
LEAST_SHARED, AMPLE_SHARED = 4 << 20, 256 << 20
_ENLARGE = "enlarge it: docker run --shm-size=1g, or mount -o remount,size=2G /dev/shm"


def temporary() -> str:
    """Return the temporary directory that programs use, whether or not it can be used."""
    return next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")


def probe() -> dict[str, object]:
    """Return the limits of open files and of a file's bytes (None: none), the temporary directory, its room."""
    (files, most), (size, _) = (resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE))
    path = temporary()
    found = {"open": None if files == resource.RLIM_INFINITY else files, "most open": most,
             "bytes": None if size == resource.RLIM_INFINITY else size, "temporary": path, "free": 0}  # fmt: skip
    return {**found, **_room(path)}


def _room(path: str) -> dict[str, object]:
    try:
        room = os.statvfs(path)
        if not os.path.isdir(path):
            return {"reason": os.strerror(errno.ENOTDIR)}
    except OSError as error:
        return {"reason": error.strerror}
    if not os.access(path, os.W_OK | os.X_OK):
        return {"reason": os.strerror(errno.EROFS if room.f_flag & os.ST_RDONLY else errno.EACCES)}
    if room.f_files and not room.f_favail:
        return {"reason": "it can hold no more files (df -i)"}
    return {"reason": "", "free": room.f_bavail * room.f_frsize}


def blamed(job: JobFacts) -> tuple[str, ...]:
    """Return the checks that cannot succeed before the limits are right."""
    facts = job.of("limits").values()
    few = any(its["open"] is not None and its["open"] < LEAST_OPEN for its in facts)
    small = any(its["bytes"] is not None and its["bytes"] < LEAST_FILE for its in facts)
    return ("start", "OpenCL", "device") if few or small else ()


def check(job: JobFacts) -> Iterator[Finding]:
    """Judge the limits of all ranks, and the temporary directory of each host."""
    for (count, most), ranks in job.alike("limits", lambda facts: (facts["open"], facts["most open"])).items():
        yield from _open_files(job.who(ranks), count, most)
    for size, ranks in job.alike("limits", lambda facts: facts["bytes"]).items():
        if size is not None and size < AMPLE_FILE:
            what = f"{job.who(ranks)}a file may have {format_size(size)} at most (ulimit -f)"
            if size < LEAST_FILE:
                yield problem("limits", f"{what}: no kernel can be built", "ulimit -f unlimited", bytes=size)
            else:
                yield note("limits", f"{what}: a checkpoint may be larger", "ulimit -f unlimited", bytes=size)
    for where, facts in job.by_host("limits"):
        yield _temporary(where, facts)


def _open_files(who: str, count: int | None, most: int) -> Iterator[Finding]:
    if count is None or count >= AMPLE_OPEN:
        yield ok("limits", f"{who}{'any number of' if count is None else f'{count:,}'} files may be open")
        return
    raised = most == resource.RLIM_INFINITY or most >= AMPLE_OPEN
    remedy = "ulimit -n 1024" if raised else "raise it where the limit is set: docker run --ulimit nofile=1024"
    what = f"{who}{count:,} files may be open at once (ulimit -n)"
    if count < LEAST_OPEN:
        yield problem("limits", f"{what}: MPI and OpenCL need more", remedy, open=count)
    else:
        yield note("limits", f"{what}: jobs of many ranks need more", remedy, open=count)


def _temporary(where: str, facts: Facts) -> Finding:
    path, free = facts["temporary"], facts["free"]
    elsewhere = "make room, or name another one: export TMPDIR=DIR"
    if facts["reason"]:
        return problem("temporary", f"{path}{where} cannot be used: {facts['reason']}", elsewhere, **facts)
    what = f"{path}{where}, {format_size(free)} free"
    if free < LEAST_ROOM:
        return problem("temporary", f"{what}: it is full, and drivers and MPI write to it", elsewhere, **facts)
    if free < AMPLE_ROOM:
        return note("temporary", f"{what}: that may not be enough for building kernels", elsewhere, **facts)
    return ok("temporary", what, **facts)


def probe_shared_memory() -> dict[str, object]:
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


def lacks_shared_memory(facts: Facts) -> bool:
    """Return whether MPI has no room for its own files, so that a rank that starts it ends by SIGBUS."""
    return FAILED not in facts and facts["bytes"] > 0 and facts["free"] < LEAST_SHARED


def check_shared_memory(job: JobFacts) -> Iterator[Finding]:
    """Judge the room on each host, and whether its ranks share a window."""
    for where, facts in job.by_host("shared memory"):
        shown = f"{format_size(facts['free'])} of {format_size(facts['bytes'])} free{where}"
        if facts["reason"]:
            what = f"{facts['reason']}{where}: ranks reduce through MPI"
            yield problem("/dev/shm", what, "mount a tmpfs there, writable by all (mode 1777)", **facts)
        elif facts["free"] < LEAST_SHARED:
            yield problem(
                "/dev/shm", f"full: {shown}: MPI ends its ranks by SIGBUS",
                f"{_ENLARGE}; ls -l /dev/shm shows what fills it", **facts,
            )  # fmt: skip
        elif facts["free"] < AMPLE_SHARED:
            yield note("/dev/shm", f"{shown}: room for small models alone", _ENLARGE, **facts)
        else:
            yield ok("/dev/shm", shown, **facts)
    yield from _window(job)


def _window(job: JobFacts) -> Iterator[Finding]:
    found = [(where, facts["window"]) for where, facts in job.by_host("world") if "window" in facts]
    found += [(where, facts["window"]) for where, facts in job.by_host("start") if "window" in facts]
    for where, shares in found:
        if shares:
            yield ok("window", f"the ranks of a host share memory{where}")
        else:
            yield problem(
                "window", f"MPI offers its ranks no shared memory{where}: gradients are copied through MPI",
                "make room in /dev/shm; with Open MPI unset OMPI_MCA_osc=^sm (docs/launchers.md)",
            )  # fmt: skip
