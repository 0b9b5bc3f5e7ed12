"""The directories of caches, with and without a writable home directory."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

from clcomm.base.host import variables
from clcomm.base.host.launcher import launched_rank
from clcomm.base.storage.private import make_private, private_temporary

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
