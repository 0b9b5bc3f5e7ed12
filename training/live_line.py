"""A line of a terminal that is repainted in place, while other output goes above it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from clcomm.base.console.terminal import terminal_of_output

if TYPE_CHECKING:
    from rich.console import Console

#: ECMA-48's "erase to the end of the line".
_ERASE = "\x1b[K"


class LiveLine:
    """The last line of a terminal. Until it is closed, this rank's standard error goes above it.

    Args:
        stream: the terminal.
        width: returns its current width in characters.
        may_repaint: returns whether the job is in the terminal's foreground.
        errors: the stream that receives standard error's text; None: the one that receives it now.
    """

    def __init__(
        self,
        stream: TextIO,
        width: Callable[[], int],
        may_repaint: Callable[[], bool] = lambda: True,
        errors: TextIO | None = None,
    ):
        self._stream, self._width, self._may_repaint = stream, width, may_repaint
        self._is_painted = False
        self._errors = sys.stderr
        self._above = sys.stderr = _Above(self, errors or sys.stderr)

    @property
    def room(self) -> int:
        """The number of characters that fit; at the last column a terminal may begin a new line."""
        return self._width() - 1

    def paint(self, text: str) -> None:
        """Replace the text, unless the job is in the background."""
        if self._may_repaint():
            self._write(f"\r{text[: self.room]}{_ERASE}")
            self._is_painted = True

    def clear(self) -> None:
        """Erase the line, so that other output can take its place."""
        if self._is_painted:
            self._is_painted = False
            self._write(f"\r{_ERASE}")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal is gone; the training goes on
            self._may_repaint = lambda: False

    def close(self) -> None:
        """Restore the terminal."""
        self.clear()
        if sys.stderr is self._above:
            sys.stderr = self._errors


class _Above(io.TextIOBase):
    """Writes to a stream, above a live line."""

    def __init__(self, line: LiveLine, stream: TextIO):
        self._line, self._stream = line, stream

    def write(self, text: str) -> int:
        self._line.clear()
        written = self._stream.write(text)
        self._stream.flush()
        return written

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def live_line(console: Console) -> LiveLine | None:
    """Return a line on a console's terminal; None if the console is not on a terminal."""
    if not console.is_terminal:
        return None
    terminal = terminal_of_output()
    if terminal is None:
        return LiveLine(console.file, lambda: console.width)  # type: ignore[arg-type]
    errors = console.file if console.file is not sys.stdout and terminal.takes_errors else None
    return LiveLine(console.file, lambda: console.width, terminal.may_repaint, errors)  # type: ignore[arg-type]
