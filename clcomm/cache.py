"""Files that may be made anew at any time: where they lie, and writing one whole or not at all."""

from __future__ import annotations

import os
import secrets
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


def is_special(path: Path) -> bool:
    """Say whether a path leads to a device or a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_whole(path: str | os.PathLike, text: str, name: str) -> None:
    """Write a file so that nobody ever sees a part of it; its directory is made where it is missing.

    What is no file, such as /dev/null or a pipe, is written to as it is: no file may take its place.
    Raises ArgumentError that begins with `name`, the option or variable that led here, when it can't be written.
    """
    target = Path(path)
    temporary: Path | None = None
    try:
        if is_special(target):
            target.write_text(text, encoding="utf-8")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        with open(unfinished, "x", encoding="utf-8") as file:
            temporary = unfinished
            file.write(text)
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise ArgumentError(f"{name}: expected a file to write, got {str(target)!r}: {error.strerror}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
