"""Regular files at user-given paths: reading never blocks, writing is atomic, other kinds are never replaced."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from clcomm.base.errors import ArgumentError, CheckpointWriteError, OutputError

FilePath = str | os.PathLike[str]
#: Suffix of a file that is not complete yet.
PARTIAL = ".partial"
#: The most symbolic links that are followed, as in Linux.
_MOST_LINKS = 40
_KINDS = (
    (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip
#: Errors that may not occur again after a restart: disks get space, descriptors are closed.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM)
#: Opening neither follows a symbolic link nor blocks, and child processes do not inherit the descriptor.
_SAFE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_regular(path: FilePath, most_bytes: int | None = None) -> BufferedReader:
    """Open a regular file of at most `most_bytes` for reading; OSError for anything else, without blocking."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    info = os.fstat(descriptor)
    reason = "" if stat.S_ISREG(info.st_mode) else kind_of(info.st_mode)
    if most_bytes is not None and info.st_size > most_bytes:
        reason = f"longer than {most_bytes} bytes"
    if reason:
        os.close(descriptor)
        raise OSError(errno.EINVAL, reason, os.fspath(path))
    return open(descriptor, "rb")


def read_regular(path: FilePath, most_bytes: int) -> bytes:
    """Return a regular file's content; OSError for anything else and for more than `most_bytes`."""
    with open_regular(path, most_bytes) as file:
        return file.read(most_bytes)


def open_own(name: FilePath, flags: int, directory: int | None = None) -> int:
    """Return the descriptor of a file that no other user can have put there; OSError for anything else.

    It is a regular file of this user's, or of any owner for root, without another name, and no link is followed.

    Args:
        directory: the descriptor of the folder that `name` is in; None: the current one.
    """
    descriptor = os.open(name, flags | _SAFE_FLAGS, 0o666, dir_fd=directory)
    info = os.fstat(descriptor)
    reason = "" if stat.S_ISREG(info.st_mode) else kind_of(info.st_mode)
    if os.geteuid() not in (0, info.st_uid):
        reason = "a file of another user"
    elif info.st_nlink > 1:
        reason = "a file with another name"
    if reason:
        os.close(descriptor)
        raise OSError(errno.EPERM, reason, os.fspath(name))
    return descriptor


def kind_of(mode: int) -> str:
    """Return the kind of a file that is not regular, such as "a directory", by its st_mode."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "not a regular file")


def destination(path: FilePath) -> Path:
    """Return the real path for writing to `path`: symbolic links are followed, except another user's.

    Raises OSError, with the reason as its strerror, if anything but a regular file is there.
    """
    target = Path(path)
    for _ in range(_MOST_LINKS):
        try:
            info = target.lstat()
        except FileNotFoundError:
            return target
        if not stat.S_ISLNK(info.st_mode):
            if not stat.S_ISREG(info.st_mode):
                raise OSError(errno.EINVAL, kind_of(info.st_mode), os.fspath(path))
            return target
        if info.st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, "a symbolic link of another user", os.fspath(path))
        target = target.parent / os.readlink(target)
    raise OSError(errno.ELOOP, "a symbolic link that leads in a circle", os.fspath(path))


def check_writable(path: FilePath, *, in_place: bool = False) -> Path:
    """Return the path to replace or, `in_place`, to open, its directory created; OSError if writing would fail."""
    target = destination(path)
    is_there = target.exists()
    if is_there and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    if not (is_there and in_place):
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_there:
            _check_sticky(target)
        partial = unused_name(target)
        os.close(_new(partial, 0o600))
        partial.unlink()
    return target


def check_directory(path: FilePath) -> None:
    """Create a directory if missing; OSError where files cannot be created in it."""
    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    probe = unused_name(target / "probe")
    os.close(_new(probe, 0o600))
    probe.unlink()


@contextmanager
def replacing(path: FilePath, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that replaces the one at `path` when the block ends, and is removed when the block raises.

    Until then it has a unique name beside `path`; its content is on disk before it is renamed. The directory is created
    if missing.

    Args:
        mode: its permissions, before the umask.

    Raises:
        OSError: the file cannot be written.
    """
    target = destination(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = unused_name(target)
    try:
        with open(_new(partial, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def saving(what: str, path: FilePath) -> Iterator[None]:
    """Raise CheckpointWriteError for an OSError of this block, which replaces the file at `path`.

    what: the file's content, such as "weights", named first in the error.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(
            f"{what} {os.fspath(path)}: could not be written ({error.strerror or error}); the old file is kept"
        ) from None


def partials_of(target: Path) -> list[Path]:
    """Return the incomplete files beside `target`, of killed writers and of those still writing."""
    name = re.compile(rf"\.{re.escape(target.name)}(\.[0-9a-f]{{16}})?{re.escape(PARTIAL)}")
    with suppress(OSError):
        return [target.with_name(each) for each in os.listdir(target.parent) if name.fullmatch(each)]
    return []


def write_whole(path: FilePath, text: str, name: str) -> None:
    """Write a file atomically, its directory created if missing; raises the error of `unwritable`."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise unwritable(name, path, error) from None


def unwritable(name: str, path: FilePath, error: OSError) -> ArgumentError | OutputError:
    """Return the error for a file that could not be written: OutputError if a restart may succeed, else ArgumentError.

    Args:
        name: the option or variable with the path.
    """
    kind = OutputError if error.errno in NO_ROOM else ArgumentError
    return kind(f"{name}: expected a file to write, got {os.fspath(path)!r}: {error.strerror}")


def open_locked(path: FilePath, mode: str, **settings: Any) -> Any:
    """Open a file as open() does, its directory created, and lock it; OSError if another job writes to it."""
    target = destination(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | _SAFE_FLAGS | (os.O_APPEND if "a" in mode else 0), 0o666)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise OSError(errno.EBUSY, "another job writes it", os.fspath(path)) from None
        except OSError:
            pass  # a file system without locks
        if "w" in mode:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, mode, **settings)


def remove_tree(name: str, directory: int) -> None:
    """Remove a folder recursively, without following links; directory: descriptor of its parent. Raises OSError."""
    for _, folders, others, here in os.fwalk(name, topdown=False, dir_fd=directory):
        for each in others:
            os.unlink(each, dir_fd=here)
        for each in folders:
            if stat.S_ISLNK(os.lstat(each, dir_fd=here).st_mode):
                os.unlink(each, dir_fd=here)
            else:
                os.rmdir(each, dir_fd=here)
    os.rmdir(name, dir_fd=directory)


def unused_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}{PARTIAL}")


def _new(path: Path, mode: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def _check_sticky(target: Path) -> None:
    """Raise PermissionError for another user's file in a directory where only owners may replace files, as in /tmp."""
    directory, own = target.parent.stat(), os.geteuid()
    if directory.st_mode & stat.S_ISVTX and own not in (0, directory.st_uid, target.stat().st_uid):
        raise PermissionError(errno.EPERM, "a file of another user", os.fspath(target))
