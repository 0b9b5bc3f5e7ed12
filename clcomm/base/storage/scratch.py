"""Scratch files in the system's temporary directory and in /dev/shm, and the removal of those left by killed jobs.

A process locks each file that it creates, and the system releases the lock when the process ends: an unlocked file
is unused, also where containers share the directory.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clcomm.base.errors import ArgumentError
from clcomm.base.host import variables
from clcomm.base.storage.files import remove_tree, unwritable

#: The purposes of the files, which are part of their names.
KINDS = ("build", "memory", "run")
_NAME = re.compile(rf"clcomm-({'|'.join(KINDS)})-\w+")
#: The variable with the folder of the job that `clcomm run`, `verify` or `plan` started: the mark of its processes.
JOB = "CLCOMM_JOB_FOLDER"
#: A file system in memory that the processes of a host share.
SHARED_MEMORY = "/dev/shm"
#: A younger file may not be locked yet.
_YOUNG_S = 60.0
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def temporary_directory() -> str:
    """Return the system's temporary directory; ArgumentError where none is writable."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ArgumentError(f"TMPDIR: expected a directory that can be written to: {error.strerror}") from None


def path_of(kind: str, name: str = "", place: str = "") -> Path:
    """Return the path of a scratch directory of one of KINDS that is not there yet.

    Args:
        name: the last part; "": drawn.
        place: SHARED_MEMORY; "": the folder of the job that this process belongs to, if there is one on this host, else
            the temporary directory.
    """
    job = variables.text(JOB)
    where = place or (job if not name and os.path.isdir(job) else temporary_directory())
    return Path(where, f"clcomm-{kind}-{name or secrets.token_hex(8)}")


@contextmanager
def scratch_directory(kind: str, path: Path | None = None) -> Iterator[Path]:
    """Create a private directory of one of KINDS and remove it at the end.

    path: from `path_of`; None: its default.

    Raises ArgumentError where it cannot be created, OutputError where there is no space.
    """
    path = path or path_of(kind)
    try:
        path.mkdir(0o700)
    except OSError as error:
        in_memory = path.parent == Path(SHARED_MEMORY)
        raise unwritable(SHARED_MEMORY if in_memory else "TMPDIR", path.parent, error) from None
    descriptor = os.open(path, _FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def in_job_folder() -> Iterator[None]:
    """Let a library make temporary files in the folder of this process's job, which is removed with the job."""
    job, before = variables.text(JOB), os.environ.get("TMPDIR")
    os.environ |= {"TMPDIR": job} if os.path.isdir(job) else {}
    try:
        yield
    finally:
        os.environ.pop("TMPDIR", None)
        os.environ |= {} if before is None else {"TMPDIR": before}


def scratch_file(path: Path, content: bytes) -> str:
    """Write a file of a scratch directory and return its path; errors as `scratch_directory`."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise unwritable("TMPDIR", path.parent, error) from None
    return str(path)


def remove_stale() -> None:
    """Remove the files that this user's killed jobs left; those of running processes and other users stay."""
    for place in (temporary_directory, lambda: SHARED_MEMORY):
        with suppress(OSError, ArgumentError):
            directory = os.open(place(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for name in filter(_NAME.fullmatch, os.listdir(directory)):
                    with suppress(OSError):
                        _remove_unless_locked(name, directory)
            finally:
                os.close(directory)


def _remove_unless_locked(name: str, directory: int) -> None:
    info = os.lstat(name, dir_fd=directory)
    if info.st_uid != os.geteuid() or time.time() - info.st_mtime < _YOUNG_S:
        return
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        return
    descriptor = os.open(name, _FLAGS, dir_fd=directory)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(info.st_mode):
            remove_tree(name, directory)
        else:
            os.unlink(name, dir_fd=directory)
    finally:
        os.close(descriptor)


# --- Locks on files that a job writes repeatedly; the error of another job names the holder. ---
# A lock is on a small file beside the file, .NAME.lock, which names the process. The system releases the lock when the
# process ends, also if it is killed; the lock file may remain, and is harmless.

#: How long a job waits for the end of an earlier one, such as one whose launcher was killed.
WAIT_S = 6.0
_POLL_S, _MOST_BYTES = 0.1, 200
_FLAGS_OF_WRITER_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class WriterLocks:
    """The locks that this process holds.

    A process has one such object (`Job.locks`): the system's lock belongs to the process, and `close` of any of its
    descriptors of a lock file releases it.
    """

    def __init__(self) -> None:
        #: Descriptor and number of holders of each lock.
        self._held: dict[Path, tuple[int, int]] = {}

    def acquire(self, target: Path, wait_s: float = WAIT_S) -> tuple[Path, int] | None:
        """Lock the file at `target` for this process and return the lock; None where the file system has no locks.

        Raises OSError if another process holds the lock for `wait_s` seconds more; its strerror names the holder.
        """
        path = target.with_name(f".{target.name}.lock").absolute()
        descriptor, holders = self._held.get(path, (-1, 0))
        if not holders:
            found = _locked(path, time.monotonic() + wait_s)
            if found is None:
                return None
            descriptor = found
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        self._held[path] = descriptor, holders + 1
        return path, os.getpid()

    def release(self, held: tuple[Path, int] | None) -> None:
        """Release a lock, once for each `acquire`; no-op in a forked child."""
        if held is None or held[1] != os.getpid() or held[0] not in self._held:
            return
        path = held[0]
        descriptor, holders = self._held.pop(path)
        if holders > 1:
            self._held[path] = descriptor, holders - 1
            return
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _locked(path: Path, deadline: float) -> int | None:
    """Return the descriptor of a lock file, locked before the deadline (monotonic seconds); None without locks."""
    while True:
        descriptor = os.open(path, _FLAGS_OF_WRITER_LOCK, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = "".join(filter(str.isprintable, os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace")))
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise OSError(error.errno, f"another job writes it ({holder or 'unknown process'})") from None
            time.sleep(_POLL_S)
            continue
        except OSError:
            os.close(descriptor)
            return None
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # its last holder has removed it in the meantime


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False
