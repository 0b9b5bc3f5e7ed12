"""Scratch files in the system's temporary directory and in /dev/shm, and the removal of those left by killed jobs.

A process locks each file that it creates, and the system releases the lock when the process ends: an unlocked file
is unused, also where containers share the directory.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from clcomm.errors import ArgumentError
from clcomm.storage.files import remove_tree, unwritable

#: The purposes of the files, which are part of their names.
KINDS = ("build", "chaos", "memory", "run")
_NAME = re.compile(rf"clcomm-({'|'.join(KINDS)})-\w+")
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


@contextmanager
def scratch_directory(kind: str, place: str = "") -> Iterator[Path]:
    """Create a private directory of one of KINDS and remove it at the end; errors as `scratch_file`.

    place: SHARED_MEMORY; "": the temporary directory.
    """
    name, where = (place, place) if place else ("TMPDIR", temporary_directory())
    try:
        path = Path(tempfile.mkdtemp(prefix=f"clcomm-{kind}-", dir=where))
    except OSError as error:
        raise unwritable(name, where, error) from None
    descriptor = os.open(path, _FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def scratch_file(kind: str, content: bytes) -> Iterator[IO[bytes]]:
    """Create a private file of one of KINDS with this content and remove it at the end.

    Raises ArgumentError where it cannot be created, OutputError where there is no space.
    """
    directory = temporary_directory()
    try:
        file = tempfile.NamedTemporaryFile(prefix=f"clcomm-{kind}-", dir=directory)  # noqa: SIM115
    except OSError as error:
        raise unwritable("TMPDIR", directory, error) from None
    with file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        try:
            file.write(content)
            file.flush()
        except OSError as error:
            raise unwritable("TMPDIR", directory, error) from None
        yield file


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
