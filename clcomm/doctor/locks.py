"""Locks of checkpoints: who holds one, and lock files whose job is gone."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from clcomm.doctor.finding import Finding, note, ok, problem
from clcomm.doctor.job import Job

#: What a job writes into its lock file (clcomm/storage/writer_lock.py).
_HOLDER = re.compile(r"process (\d+) on (\S+)")
_MOST_BYTES, _MOST_FILES = 200, 1000


def probe(directory: str) -> dict[str, object]:
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


def check(job: Job) -> Iterator[Finding]:
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
