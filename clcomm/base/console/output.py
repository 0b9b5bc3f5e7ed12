"""Rich consoles for rank 0's output: on the job's terminal, even behind a launcher, or in plain lines."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console, ConsoleDimensions

from clcomm.base.console.terminal import output_width, terminal_of_output


class _TerminalConsole(Console):
    """A console on a terminal that is not one of this process's standard streams."""

    @property
    def size(self) -> ConsoleDimensions:
        columns, rows = os.get_terminal_size(self.file.fileno())
        return ConsoleDimensions(self._width or columns or output_width(), rows)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


def make_console(**settings: Any) -> Console:
    """Return a console for tables: on the job's terminal if that may be repainted, else a plain one.

    Where a launcher forwards the ranks' output, the console writes to the launcher's terminal directly, so that printed
    and repainted lines stay in order.
    """
    settings = {"soft_wrap": True, **settings}
    terminal = terminal_of_output()
    if terminal is None or not terminal.may_repaint():
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        return Console(width=output_width(), force_terminal=False if is_terminal else None, **settings)
    if terminal.pid == os.getpid():
        return Console(**settings)
    try:
        return _TerminalConsole(file=terminal.open(), **settings)
    except OSError:  # closed in the meantime
        return Console(width=output_width(), **settings)
