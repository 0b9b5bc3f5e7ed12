"""Private directories, which only this user can write to or replace."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from clcomm.base.errors import ArgumentError
from clcomm.base.storage.files import unwritable
from clcomm.base.storage.scratch import temporary_directory


def exposure(directory: Path, *, chosen: bool = False) -> str:
    """Return the reason why another user could change a directory's content; "" where only root could.

    Args:
        directory: an absolute path.
        chosen: named by the user, who then trusts the owners of the directories above it.

    Raises:
        OSError: a directory cannot be examined.
    """
    own = os.geteuid()
    trusted = {0, own, os.stat("/").st_uid}  # in a container root may have another number
    leaf, *above = (directory, *directory.parents)
    info = leaf.lstat()
    if not stat.S_ISDIR(info.st_mode):
        return "it is not a directory"
    if info.st_uid != own:
        return f"it belongs to user {info.st_uid}, not to user {own}"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(info.st_mode):04o}); chmod go-w it"
    for parent in above:
        info = parent.stat()
        if info.st_uid not in trusted and not chosen:
            return f"{parent} above it belongs to user {info.st_uid}"
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
            return f"others may write to {parent} above it"
    return ""


def make_private(directory: Path) -> None:
    """Create a missing directory and its parents, readable by this user only. Raises OSError."""
    for each in (*reversed(directory.parents), directory):
        if not each.exists():
            try:
                each.mkdir(mode=0o700)
            except FileExistsError:
                if not each.is_dir():
                    raise


def unfit(directory: Path, *, chosen: bool = False) -> str:
    """Return the reason why a directory, created if missing, cannot hold code that this user runs; "" if it can.

    Args:
        directory: an absolute path without links.
        chosen: named by the user, as for `exposure`.
    """
    try:
        make_private(directory)
        can_write = os.access(directory, os.W_OK)
        return exposure(directory, chosen=chosen) or ("" if can_write else os.strerror(errno.EACCES))
    except OSError as error:
        return error.strerror or str(error)


def first_private(candidates: Iterable[Path], name: str) -> Path:
    """Return the first candidate that can hold code that this user runs, else a temporary directory of that name.

    Raises ArgumentError, as `private_temporary` does, where there is none.
    """
    for directory in candidates:
        if not unfit(directory):
            return directory
    directory = private_temporary() / name
    make_private(directory)
    return directory


def private_temporary() -> Path:
    """Return this user's own directory in the temporary directory, the same for all processes.

    Raises ArgumentError where it cannot be created, or another user could write to it.
    """
    path = Path(temporary_directory()).resolve() / f"clcomm-{os.geteuid()}"
    try:
        make_private(path)
        problem = exposure(path)
    except OSError as error:
        raise unwritable("TMPDIR", path, error) from None
    if problem:
        raise ArgumentError(f"{path}: expected a directory of this user's alone, but {problem}; set TMPDIR to another")
    return path
