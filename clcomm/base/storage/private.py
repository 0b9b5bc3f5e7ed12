"""Private directories, which only this user can write to or replace."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from clcomm.base.errors import ArgumentError
from clcomm.base.host import variables
from clcomm.base.host.launcher import launched_rank
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


# --- The directories of caches, with and without a writable home directory. ---

_log = logging.getLogger("clcomm")


def cache_directory() -> Path:
    """Return the directory of clcomm's caches: $CLCOMM_CACHE_DIR, else `clcomm` in the user's cache directory.

    Raises ArgumentError as `user_cache` does.
    """
    own = variables.text("CLCOMM_CACHE_DIR")
    return Path(own) if own else user_cache() / "clcomm"


def user_cache() -> Path:
    """Return $XDG_CACHE_HOME or ~/.cache; where that is not writable, a temporary directory, with one warning.

    Raises ArgumentError where no temporary directory is writable either.
    """
    common = os.environ.get("XDG_CACHE_HOME")
    try:
        directory = Path(common) if common else Path.home() / ".cache"
    except RuntimeError:  # no HOME, and no entry among the system's users
        return _fallback_for(None)
    return directory if _can_hold_files(directory) else _fallback_for(directory)


def _can_hold_files(directory: Path) -> bool:
    """Return whether a directory, which is created if missing, is writable."""
    try:
        make_private(directory)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


@cache  # so that it warns only once
def _fallback_for(directory: Path | None) -> Path:
    """Return the temporary directory for caches and log the reason: `directory` is not writable, or None is known."""
    path = private_temporary()
    if not launched_rank():
        reason = "no home directory" if directory is None else f"{directory} cannot be written to"
        _log.warning("%s: caches are kept in %s; XDG_CACHE_HOME names a better place", reason, path)
    return path
