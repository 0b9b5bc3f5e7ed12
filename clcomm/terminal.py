"""The terminal that a job's output ends on, which behind mpiexec no rank has, and how long lines may be.

A launcher gives its ranks pipes, or a pseudo-terminal (Open MPI), and passes on what they write. On Linux /proc shows
the launcher among the rank's ancestors, and where its own output goes.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Callable
from typing import NamedTuple, TextIO, TypeVar

T = TypeVar("T")

#: Characters in a line where output goes to a file or a pipe, unless COLUMNS says; and on a terminal without a size.
PLAIN_WIDTH, _UNKNOWN_WIDTH = 120, 80
#: No table can be narrower.
LEAST_WIDTH = 40
#: How the names of programs begin that start ranks and pass on their output: MPICH's and Open MPI's.
_LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prterun")


class _Process(NamedTuple):
    """What /proc/<pid>/stat says of a process; `device` is its terminal's, whose foreground group is `foreground`."""

    name: str
    parent: int
    group: int
    device: int
    foreground: int


class Terminal(NamedTuple):
    """A terminal that is the standard output of process `pid`: of this one, or of the job's launcher."""

    pid: int

    @property
    def path(self) -> str:
        """What to open it by."""
        return f"/proc/{self.pid}/fd/1"

    @property
    def takes_errors(self) -> bool:
        """Whether the process's standard error goes there too."""
        return _device(f"/proc/{self.pid}/fd/2") == _device(self.path)

    @property
    def width(self) -> int:
        """Characters in a line, as of now."""
        return _asked(self.path, lambda descriptor: os.get_terminal_size(descriptor).columns) or _UNKNOWN_WIDTH

    def open(self) -> TextIO:
        """Return a stream to write to it; raises OSError where it is gone."""
        return os.fdopen(_opened(self.path), "w", encoding="utf-8", errors="replace")

    def may_repaint(self) -> bool:
        """Say whether a line of it may be written over and over: not from the background, nor where nobody looks."""
        if os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("CI"):
            return False
        process = _process(self.pid)
        is_own = self.pid == os.getpid()
        if process is None or process.device != _device(self.path):
            return process is not None and is_own  # no controlling terminal: nothing says what is in the foreground
        return process.group == process.foreground and (is_own or not self._stops_others())

    def _stops_others(self) -> bool:
        """Whether ranks, whose groups are not the launcher's, would be stopped when they write (stty tostop)."""
        return bool(_asked(self.path, lambda descriptor: termios.tcgetattr(descriptor)[3] & termios.TOSTOP))


def terminal_of_output() -> Terminal | None:
    """Return the terminal that shows what this rank prints; None for a file, a pipe such as `| tee`, another host's."""
    launcher = _launcher()
    if launcher is None and "OMPI_COMM_WORLD_SIZE" in os.environ:
        return None  # Open MPI's daemon of another host gave it a terminal, and passes on whole lines
    found = Terminal(launcher or os.getpid())
    return found if _asked(found.path, os.isatty) else None


def output_width() -> int:
    """Return how long lines of output may be: what COLUMNS says, the terminal's width, or 120 in files and pipes."""
    terminal = None if _asked_for() else terminal_of_output()
    return max(terminal.width, LEAST_WIDTH) if terminal else plain_width()


def plain_width() -> int:
    """Return how long lines of files may be: what COLUMNS says, else 120."""
    return max(_asked_for(), LEAST_WIDTH) if _asked_for() else PLAIN_WIDTH


def _asked_for() -> int:
    """Return what COLUMNS says; 0: nothing."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else 0


def _launcher() -> int | None:
    """Return the process that started this job's ranks, the outermost where several did; None where none is here."""
    found, process = None, _process(os.getpid())
    while process is not None and process.parent > 0:
        pid, process = process.parent, _process(process.parent)
        if process is not None and process.name.startswith(_LAUNCHERS):
            found = pid
    return found


def _process(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return None
    _, parent, group, _, device, foreground, *_ = rest.split()
    return _Process(name, int(parent), int(group), int(device), int(foreground))


def _device(path: str) -> int:
    """Return the number of a terminal's device as /proc/<pid>/stat writes it; 0 for what is none."""
    try:
        number = os.stat(path).st_rdev
    except OSError:
        return 0
    major, minor = os.major(number), os.minor(number)
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_NOCTTY)


def _asked(path: str, question: Callable[[int], T]) -> T | None:
    """Return what a question about an open terminal gives; None where it cannot be opened or is no terminal."""
    try:
        descriptor = _opened(path)
    except OSError:
        return None
    try:
        return question(descriptor)
    except (OSError, termios.error):
        return None
    finally:
        os.close(descriptor)
