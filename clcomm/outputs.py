"""Files that a command is told to write: whether it can, found out before it works for minutes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from clcomm.cache import is_special
from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError


def check_writable(control: Communicator, files: dict[str, str | None]) -> None:
    """Raise ArgumentError on every rank for a file that rank 0 could not write; collective."""
    problem = None
    if control.rank == 0:
        for option, name in files.items():
            if name is not None and not _is_writable(Path(name)):
                problem = f"{option}: expected a file in a directory that can be written to, got {name!r}"
    problem = control.broadcast_object(problem)
    if problem:
        raise ArgumentError(problem)


def _is_writable(path: Path) -> bool:
    try:
        if is_special(path):
            return os.access(path, os.W_OK)
        with tempfile.TemporaryFile(dir=path.parent):  # permissions alone do not tell of all file systems
            return not path.is_dir()
    except OSError:
        return False
