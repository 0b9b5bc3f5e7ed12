"""Short-lived files in the system's temporary directory, and the removal of those that killed jobs left there.

A process keeps a lock on what it makes, which the system lets go of when that process ends: so it is seen, in
containers that share the directory too, whose files nobody needs any more.
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
from typing import Any

from clcomm.errors import ArgumentError
from clcomm.files import remove_tree, unwritable

#: What these files' names begin with, by what they are for.
KINDS = ("build", "run")
_NAME = re.compile(rf"clcomm-({'|'.join(KINDS)})-\w+")
#: What is younger may not be locked yet.
_YOUNG_S = 60.0
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def temporary_directory() -> str:
    """Return the system's temporary directory; ArgumentError where there is none that can be written to."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ArgumentError(f"TMPDIR: expected a directory that can be written to: {error.strerror}") from None


@contextmanager
def scratch_directory(kind: str) -> Iterator[Path]:
    """Make a directory of this user alone, of one of KINDS, and remove it in the end; errors as `scratch_file`."""
    try:
        path = Path(tempfile.mkdtemp(prefix=f"clcomm-{kind}-", dir=temporary_directory()))
    except OSError as error:
        raise unwritable("TMPDIR", temporary_directory(), error) from None
    descriptor = os.open(path, _FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def scratch_file(kind: str, content: bytes) -> Iterator[Any]:
    """Make a file of this user alone, of one of KINDS, with this content, and remove it in the end.

    Raises ArgumentError where there is no place for it, OutputError where there is no room.
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


def sweep() -> None:
    """Remove what this user's jobs left that were killed; what another process may need, or another user's, stays."""
    with suppress(OSError, ArgumentError):
        directory = os.open(temporary_directory(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
