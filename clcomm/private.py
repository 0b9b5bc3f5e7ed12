"""Directories into which nobody else can put files: this user owns them, and all that lead to them are safe."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clcomm.errors import ArgumentError
from clcomm.files import unwritable
from clcomm.scratch import temporary_directory


def exposure(directory: Path, *, chosen: bool = False) -> str:
    """Return why another user could change what is in a directory, in words; "" where none but root could.

    chosen: by the user, who answers for those to whom the directories above it belong. Raises OSError where that cannot
    be seen.
    """
    own = os.geteuid()
    trusted = {0, own, os.stat("/").st_uid}  # in a container root may have another number
    leaf, *above = (directory, *directory.parents)
    info = leaf.lstat()
    if not stat.S_ISDIR(info.st_mode):
        return "it is no directory"
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
    """Make a directory that is missing, and those above it, for this user alone; OSError where that is refused."""
    for each in (*reversed(directory.parents), directory):
        if not each.exists():
            try:
                each.mkdir(mode=0o700)
            except FileExistsError:
                if not each.is_dir():
                    raise


def private_temporary() -> Path:
    """Return this user's own directory among the temporary ones, the same for all processes.

    Raises ArgumentError where there is no place for one, or something of another user is in its place.
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
