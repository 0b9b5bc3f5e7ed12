"""The terminal of a job's output, behind mpiexec the launcher's, and the width of output lines.

A launcher gives its ranks pipes, or a pseudo-terminal (Open MPI), and forwards what they write. On Linux /proc shows
the launcher among the rank's ancestors, and where its own output goes.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Callable
from typing import NamedTuple, TextIO, TypeVar

T = TypeVar("T")

#: Characters in a line of a file or a pipe where COLUMNS is not set, and of a terminal without a size.
PLAIN_WIDTH, _UNKNOWN_WIDTH = 120, 80
#: The least width of a table.
LEAST_WIDTH = 40
#: Prefixes of the names of launchers, which forward their ranks' output: MPICH's and Open MPI's.
_LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prterun")


class _ProcessStat(NamedTuple):
    """Fields of /proc/<pid>/stat; `device`: the process's terminal; `foreground`: that terminal's foreground group."""

    name: str
    parent: int
    group: int
    device: int
    foreground: int


class Terminal(NamedTuple):
    """A terminal that is the standard output of process `pid`: this one, or the job's launcher."""

    pid: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/1"

    @property
    def takes_errors(self) -> bool:
        """Whether it is also the process's standard error."""
        return _device(f"/proc/{self.pid}/fd/2") == _device(self.path)

    @property
    def width(self) -> int:
        """Current number of characters in a line; 80 where the terminal does not report one."""
        return _query(self.path, lambda descriptor: os.get_terminal_size(descriptor).columns) or _UNKNOWN_WIDTH

    def open(self) -> TextIO:
        """Return a stream to write to it; OSError where it was closed."""
        return os.fdopen(_opened(self.path), "w", encoding="utf-8", errors="replace")

    def may_repaint(self) -> bool:
        """Return whether a line may be overwritten: in the foreground, and neither in CI nor on a dumb terminal."""
        if os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("CI"):
            return False
        process = _process(self.pid)
        is_own = self.pid == os.getpid()
        if process is None or process.device != _device(self.path):
            return process is not None and is_own  # no controlling terminal, so no foreground group
        return process.group == process.foreground and (is_own or not self._stops_others())

    def _stops_others(self) -> bool:
        """Whether the terminal stops ranks that write, as their process groups are not the launcher's (stty tostop)."""
        return bool(_query(self.path, lambda descriptor: termios.tcgetattr(descriptor)[3] & termios.TOSTOP))


def terminal_of_output() -> Terminal | None:
    """Return the terminal that shows this rank's output; None for a file, a pipe such as `| tee`, or another host."""
    launcher = _launcher()
    if launcher is None and "OMPI_COMM_WORLD_SIZE" in os.environ:
        return None  # this rank's parent is Open MPI's daemon on another host, which forwards whole lines
    found = Terminal(launcher or os.getpid())
    return found if _query(found.path, os.isatty) else None


def output_width() -> int:
    """Return the width of output lines: COLUMNS, the terminal's width, or 120 for files and pipes."""
    terminal = None if _columns_variable() else terminal_of_output()
    return max(terminal.width, LEAST_WIDTH) if terminal else plain_width()


def plain_width() -> int:
    """Return the width of lines in files and pipes: COLUMNS, else 120."""
    return max(_columns_variable(), LEAST_WIDTH) if _columns_variable() else PLAIN_WIDTH


def _columns_variable() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else 0


def _launcher() -> int | None:
    """Return the pid of this rank's launcher, the outermost of several; None without one on this host."""
    found, process = None, _process(os.getpid())
    while process is not None and process.parent > 0:
        pid, process = process.parent, _process(process.parent)
        if process is not None and process.name.startswith(_LAUNCHERS):
            found = pid
    return found


def _process(pid: int) -> _ProcessStat | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return None
    _, parent, group, _, device, foreground, *_ = rest.split()
    return _ProcessStat(name, int(parent), int(group), int(device), int(foreground))


def _device(path: str) -> int:
    """Return a terminal's device number in the encoding of /proc/<pid>/stat; 0 where `path` does not exist."""
    try:
        number = os.stat(path).st_rdev
    except OSError:
        return 0
    major, minor = os.major(number), os.minor(number)
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_NOCTTY)


def _query(path: str, question: Callable[[int], T]) -> T | None:
    """Return `question(descriptor)` of an opened terminal; None where it cannot be opened or is no terminal."""
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
