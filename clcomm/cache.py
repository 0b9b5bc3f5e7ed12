"""Files that may be made anew at any time: where they lie, with a home directory that can be written to and without."""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

from clcomm.private import make_private, private_temporary

#: What launchers call a rank's number in the job.
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")

_log = logging.getLogger("clcomm")


def cache_directory() -> Path:
    """Return where clcomm's own caches are: $CLCOMM_CACHE_DIR, else `clcomm` in the user's cache directory.

    Raises ArgumentError as `user_cache` does.
    """
    own = os.environ.get("CLCOMM_CACHE_DIR")
    return Path(own) if own else user_cache() / "clcomm"


def user_cache() -> Path:
    """Return $XDG_CACHE_HOME or ~/.cache; where that cannot be written to, a temporary directory, which is said once.

    Raises ArgumentError where there is no place for that either.
    """
    common = os.environ.get("XDG_CACHE_HOME")
    try:
        directory = Path(common) if common else Path.home() / ".cache"
    except RuntimeError:  # no HOME, and no entry among the system's users
        return _instead_of(None)
    return directory if _can_hold_files(directory) else _instead_of(directory)


def _can_hold_files(directory: Path) -> bool:
    """Say whether a directory, which is made where it is missing, can be written to."""
    try:
        make_private(directory)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


@cache  # so that it is said once
def _instead_of(directory: Path | None) -> Path:
    path = private_temporary()
    if all(os.environ.get(name, "0") == "0" for name in _RANK_VARIABLES):
        reason = "no home directory" if directory is None else f"{directory} cannot be written to"
        _log.warning("%s: caches are kept in %s; XDG_CACHE_HOME names a better place", reason, path)
    return path
