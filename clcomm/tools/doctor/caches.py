"""Caches: their directories, whether kernels can be stored, and whether stored ones are intact."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from clcomm.base.console.finding import Finding, note, ok, problem
from clcomm.base.host import variables
from clcomm.base.units import format_size
from clcomm.tools.doctor.job import JobFacts
from clcomm.tools.doctor.limits import temporary

#: Less room than this is too little for a model's kernels.
_LEAST_BYTES = 64 << 20


def probe() -> dict[str, object]:
    """Return the caches' directories, reasons against them, and their damaged programs; creates nothing."""
    wanted = own_directory()
    reason, pocl = _unfit(wanted), os.environ.get("POCL_CACHE_DIR", "")
    used = wanted if not reason or variables.text("CLCOMM_CACHE_DIR") else Path(temporary(), f"clcomm-{os.geteuid()}")
    return {
        "wanted": str(wanted), "used": os.path.realpath(used), "reason": reason, "free": _free(str(used)),
        "pocl": pocl, "pocl reason": _unfit(Path(pocl)) if pocl else "", "damaged": _damaged(used),
    }  # fmt: skip


def own_directory() -> Path:
    own = variables.text("CLCOMM_CACHE_DIR")
    return Path(own) if own else _common() / "clcomm"


def _common() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"))


def _unfit(directory: Path) -> str:
    """Return the reason why a directory cannot be used, without creating it; a missing one is judged by its parent."""
    from clcomm.base.storage.private import unfit

    path = Path(os.path.realpath(directory))
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if there == path:
        return unfit(path, chosen=True)
    if not there.is_dir():
        return f"{there} is not a directory"
    if os.access(there, os.W_OK | os.X_OK):
        return ""
    return os.strerror(errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES)


def _free(directory: str) -> int:
    path = Path(directory)
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        room = os.statvfs(path)
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize


def _damaged(own: Path) -> list[str]:
    """Return the folders of stored programs whose files differ from the built ones."""
    try:
        from clcomm.engine import pocl, program
    except (ImportError, AttributeError):  # something hides NumPy, which has a line of its own
        return []
    found = []
    given = os.environ.get("POCL_CACHE_DIR")
    for cache in {Path(os.path.realpath(path)) for path in (given, _common() / "pocl" / "kcache") if path}:
        found += pocl.damaged(cache)
    if (own / "programs").is_dir():
        found += program.damaged()
    return sorted({str(path) for path in found})


def check(job: JobFacts) -> Iterator[Finding]:
    """Judge the caches of each host."""
    for where, facts in job.by_host("caches"):
        if facts["reason"]:
            yield problem(
                "caches", f"{facts['wanted']}{where} cannot be used: {facts['reason']}; "
                + (f"{facts['used']} is, which may not last" if facts["used"] != facts["wanted"] else "none is"),
                "make it writable, or name another: export XDG_CACHE_HOME=DIR", **facts,
            )  # fmt: skip
        elif facts["free"] < _LEAST_BYTES:
            yield problem(
                "caches", f"{format_size(facts['free'])} free at {facts['used']}{where}: kernels cannot be stored",
                "make room, or name another place: export XDG_CACHE_HOME=DIR", **facts,
            )  # fmt: skip
        else:
            yield ok("caches", f"{facts['used']}{where}, {format_size(facts['free'])} free", **facts)
        if facts["pocl reason"]:
            yield problem(
                "caches", f"POCL_CACHE_DIR={facts['pocl']}{where} cannot be used: {facts['pocl reason']}",
                "unset POCL_CACHE_DIR, or name a directory to which you alone can write", pocl=facts["pocl"],
            )  # fmt: skip
        if facts["damaged"]:
            first, count = facts["damaged"][0], len(facts["damaged"])
            yield note(
                "kernel cache", f"{count} of its programs {'is' if count == 1 else 'are'} damaged{where}, such as "
                f"{first}: built anew where used", f"rm -r {' '.join(facts['damaged'][:8])} makes room",
                damaged=facts["damaged"],
            )  # fmt: skip
    for rank, reason in job.failures("caches").items():
        yield note("caches", f"{job.who([rank])}could not be examined: {reason}", "export XDG_CACHE_HOME=DIR")
