"""Leftovers of other jobs: windows in /dev/shm, temporary directories, and locks of checkpoints."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from clcomm.base.console.finding import Finding, note, ok, problem
from clcomm.base.units import format_size
from clcomm.tools.doctor.job import JobFacts
from clcomm.tools.doctor.limits import temporary

#: Files of MPICH, Open MPI and Intel MPI in /dev/shm.
_WINDOW = re.compile(r"(mpich_|sm_segment\.|vader_segment\.|osc_rdma|osc_sm|shm_|Intel_MPI_|mvapich).*")
#: Directories of launchers, and of clcomm's scratch files.
_TEMPORARY = re.compile(r"(ompi\.|prte\.|openmpi-sessions-|pmix-|clcomm-(build|run|memory)-).*")
#: Younger ones may belong to a job that starts.
_YOUNG_S = 60.0
_SHARED = Path("/dev/shm")
#: How many of them a remedy names.
_MOST_NAMED = 4
#: A job's entry in its lock file (clcomm/base/storage/scratch.py).
_HOLDER = re.compile(r"process (\d+) on (\S+)")
_MOST_BYTES, _MOST_FILES = 200, 1000


def probe() -> dict[str, object]:
    """Return this user's files of MPI that no process has mapped or opened: path and bytes."""
    used = _used_files()
    windows = [
        [str(path), info.st_size] for path, info in _own(_SHARED, _WINDOW)
        if stat.S_ISREG(info.st_mode) and (info.st_dev, info.st_ino) not in used
    ]  # fmt: skip
    folders = [
        [str(path), 0] for place in (Path(temporary()), _SHARED) for path, info in _own(place, _TEMPORARY)
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


def check(job: JobFacts) -> Iterator[Finding]:
    """Judge the leftovers on each host."""
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
    """Return the command that removes the first leftovers; JSON lists all."""
    paths = " ".join(path for path, _ in found[:_MOST_NAMED])
    return f"{command} {paths}" + ("; clcomm doctor --json lists the others" if len(found) > _MOST_NAMED else "")


def probe_locks(directory: str) -> dict[str, object]:
    """Return the lock files in a directory: path, process and host that they name, and whether they are locked."""
    found = []
    for path in sorted(Path(directory).glob(".*.lock"))[:_MOST_FILES]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            named = _HOLDER.fullmatch(os.read(descriptor, _MOST_BYTES).decode(errors="replace"))
            if named:
                pid, host = int(named[1]), named[2]
                here = host == os.uname().nodename
                found.append({
                    "path": str(path), "pid": pid, "host": host, "is locked": is_locked(descriptor),
                    "lives": Path(f"/proc/{pid}").exists() if here else None,
                })  # fmt: skip
        finally:
            os.close(descriptor)
    return {"directory": os.path.abspath(directory), "locks": found}


def is_locked(descriptor: int) -> bool:
    """Return whether another process has locked a file, without locking it (fcntl(2), F_OFD_GETLK)."""
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    except (OSError, AttributeError):  # a file system without locks
        return False
    return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)


def check_locks(job: JobFacts) -> Iterator[Finding]:
    """Judge the lock files in the directory of each host."""
    for where, facts in job.by_host("locks"):
        for lock in facts["locks"]:
            name = f"{lock['path']}{where} of process {lock['pid']} on {lock['host']}"
            if lock["is locked"] and lock["lives"] is not False:
                yield note(
                    "locks", f"{name} is held: a job writes that checkpoint", "let it end, or write to another file: "
                    "--checkpoint OTHER.npz", **lock,
                )  # fmt: skip
            elif lock["is locked"]:
                yield problem(
                    "locks", f"{name} is held, though that process is gone: its file server still holds it",
                    f"rm {lock['path']}", **lock,
                )  # fmt: skip
            else:
                yield note("locks", f"{name} is stale: nobody holds it", f"rm {lock['path']}", **lock)
        if not facts["locks"]:
            yield ok("locks", f"none in {facts['directory']}{where}")
