"""Files that may be made anew at any time: where they lie, and writing one whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from clcomm.errors import ArgumentError


def cache_directory() -> Path:
    """Return $CLCOMM_CACHE_DIR, $XDG_CACHE_HOME/clcomm or ~/.cache/clcomm, the first that is set.

    Raises ArgumentError for a user without a home.
    """
    own, common = os.environ.get("CLCOMM_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    try:
        return (Path(common) if common else Path.home() / ".cache") / "clcomm"
    except RuntimeError:
        raise ArgumentError("CLCOMM_CACHE_DIR: expected a directory, as this user has no home; set it") from None
