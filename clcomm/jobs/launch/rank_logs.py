"""A file for each rank's output: `clcomm run --log-dir DIR`. Nothing slow is imported here: a rank does this first."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from clcomm.base.errors import ArgumentError, escaped
from clcomm.base.host.launcher import launched_rank
from clcomm.base.storage.files import open_own

#: Lines that say why a job ended, in a rank's file.
_OWN = re.compile(r"clcomm: .*")


def prepare(directory: str) -> str:
    """Create the directory, empty it of an earlier job's files, and return its real path.

    Raises ArgumentError where it can't be written to, and where it is another user's link.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        if os.path.islink(directory) and os.lstat(directory).st_uid not in (0, os.geteuid()):
            raise PermissionError(1, "a symbolic link of another user")
        for path in Path(directory).glob("rank-*.log"):
            path.unlink()
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ArgumentError(f"--log-dir: expected a directory to write, got {directory!r}: {error.strerror}") from None
    return os.path.realpath(directory)


def redirect(directory: str) -> None:
    """Redirect this rank's output and errors to its file, after those of an earlier start; one line where it can't."""
    name = f"rank-{launched_rank() or 0}.log"
    try:
        os.makedirs(directory, exist_ok=True)  # on another host
        file = _opened(directory, name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        sys.stderr.write(f"clcomm: --log-dir: expected {directory}/{name} to be written to: {error.strerror}\n")
        sys.exit(2)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _opened(directory: str, name: str, flags: int) -> int:
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return open_own(name, flags, folder)
    finally:
        os.close(folder)


def tell(directory: str, code: int) -> None:
    """Print in one line how a job with log files ended, with the ranks' first own line."""
    if code:
        cause = _first_own_line(directory)
        sys.stderr.write(f"clcomm run: exit code {code}; {f'{cause}; ' if cause else ''}all output is in {directory}\n")
        sys.stderr.flush()


def _first_own_line(directory: str) -> str:
    for path in sorted(Path(directory).glob("rank-*.log")):
        with suppress(OSError), open(_opened(directory, path.name, os.O_RDONLY), errors="replace") as file:
            found = _OWN.search(file.read())
            if found:
                return escaped(found[0].removesuffix(":"))
    return ""
