"""What other jobs left: windows in /dev/shm, directories of launchers and of clcomm in the temporary directory."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from clcomm.doctor.finding import Finding, note, ok
from clcomm.doctor.job import Job
from clcomm.doctor.limits import temporary
from clcomm.units import format_size

#: Files of MPICH, Open MPI and Intel MPI in /dev/shm.
_WINDOW = re.compile(r"(mpich_|sm_segment\.|vader_segment\.|osc_rdma|osc_sm|shm_|Intel_MPI_|mvapich).*")
#: Directories of launchers, and of clcomm's scratch files.
_TEMPORARY = re.compile(r"(ompi\.|prte\.|openmpi-sessions-|pmix-|clcomm-(build|run)-).*")
#: Younger ones may belong to a job that starts.
_YOUNG_S = 60.0
_SHARED = Path("/dev/shm")
#: How many of them a remedy names.
_MOST_NAMED = 4


def probe() -> dict[str, object]:
    """Return this user's files of MPI that no process has mapped or opened: path and bytes."""
    used = _used_files()
    windows = [
        [str(path), info.st_size] for path, info in _own(_SHARED, _WINDOW)
        if stat.S_ISREG(info.st_mode) and (info.st_dev, info.st_ino) not in used
    ]  # fmt: skip
    folders = [
        [str(path), 0] for path, info in _own(Path(temporary()), _TEMPORARY)
        if (info.st_dev, info.st_ino) not in used and not _holds_used(path, used) and _is_old(info)
    ]  # fmt: skip
    return {"windows": windows, "folders": folders}


def _own(directory: Path, names: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield this user's entries of a directory with such names."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if names.fullmatch(entry.name):
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if info.st_uid == os.geteuid():
                yield Path(entry.path), info


def _used_files() -> set[tuple[int, int]]:
    """Return (device, inode) of the files that this user's processes have mapped or opened."""
    found: set[tuple[int, int]] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for line in (process / "maps").read_text(errors="replace").splitlines():
                fields = line.split(None, 5)
                if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                    major, minor = fields[3].split(":")
                    found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
            for descriptor in (process / "fd").iterdir():
                try:
                    info = descriptor.stat()
                except OSError:
                    continue
                found.add((info.st_dev, info.st_ino))
        except OSError:  # gone, or another user's
            continue
    return found


def _holds_used(path: Path, used: set[tuple[int, int]]) -> bool:
    """Return whether a process has a file in this directory open, or names itself in the directory's name."""
    if any(Path(f"/proc/{number}").exists() for number in re.findall(r"\d{3,}", path.name)):
        return True
    for directory, folders, files in os.walk(path):
        for name in (*folders, *files):
            try:
                info = os.lstat(os.path.join(directory, name))
            except OSError:
                continue
            if (info.st_dev, info.st_ino) in used:
                return True
    return False


def _is_old(info: os.stat_result) -> bool:
    return time.time() - info.st_mtime > _YOUNG_S


def check(job: Job) -> Iterator[Finding]:
    """Judge what is left on each host."""
    for where, facts in job.by_host("leftovers"):
        if facts["windows"]:
            count, size = len(facts["windows"]), format_size(sum(nbytes for _, nbytes in facts["windows"]))
            yield note(
                "leftovers", f"stale windows of another job in /dev/shm{where}: {count} of {size}, which no process "
                "uses", _removal("rm", facts["windows"]), **facts,
            )  # fmt: skip
        if facts["folders"]:
            yield note(
                "leftovers", f"{len(facts['folders'])} directories of jobs that have ended{where}, such as "
                f"{facts['folders'][0][0]}", _removal("rm -r", facts["folders"]), **facts,
            )  # fmt: skip
        if not (facts["windows"] or facts["folders"]):
            yield ok("leftovers", f"none of other jobs{where}")


def _removal(command: str, found: list[tuple[str, int]]) -> str:
    """Return the command that removes what was found; of many it shows some, as JSON lists all."""
    paths = " ".join(path for path, _ in found[:_MOST_NAMED])
    return f"{command} {paths}" + ("; clcomm doctor --json lists the others" if len(found) > _MOST_NAMED else "")
