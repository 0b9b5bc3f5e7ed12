"""Output files that options name: checked before a command runs for minutes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial

from clcomm.base.errors import ArgumentError
from clcomm.base.storage import files
from clcomm.comm.communicator import Communicator

#: Paths by the options that name them; None where an option was not given.
Paths = Mapping[str, str | None]


def check_writable(
    control: Communicator,
    written: Paths,
    *,
    in_place: Paths | None = None,
    directories: Paths | None = None,
    of_each_rank: Paths | None = None,
) -> None:
    """Raise ArgumentError on every rank unless regular files can be written at these paths; collective.

    Rank 0 checks for all ranks. Missing directories are created. Two options may not name the same file.

    Args:
        control: spans all ranks.
        written: files that are replaced.
        in_place: files that are opened, not replaced, where they exist.
        directories: directories for files of any name.
        of_each_rank: this rank's own files, which each rank checks.
    """
    problem = ""
    try:
        if control.rank == 0:
            _check_distinct({**written, **(in_place or {})})
            for option, path in written.items():
                _check(option, path, "file to write", files.check_writable)
            for option, path in (in_place or {}).items():
                _check(option, path, "file to write", partial(files.check_writable, in_place=True))
            for option, path in (directories or {}).items():
                _check(option, path, "directory to write to", files.check_directory)
        for option, path in (of_each_rank or {}).items():
            _check(option, path, "file to write", files.check_writable)
    except ArgumentError as error:
        problem = str(error)
    found = [each for each in control.all_gather_object(problem) if each]
    if found:
        raise ArgumentError(found[0])


def _check(option: str, path: str | None, what: str, check: Callable[[str], object]) -> None:
    try:
        if path is not None:
            check(path)
    except OSError as error:
        raise ArgumentError(f"{option}: expected a {what}, got {path!r}: {error.strerror}") from None


def _check_distinct(written: Paths) -> None:
    seen: dict[str, str] = {}
    for option, path in written.items():
        if path:
            first = seen.setdefault(os.path.realpath(path), option)
            if first != option:
                raise ArgumentError(f"{option}: expected a file of its own, got {path!r}, which is that of {first}")
