"""Where rank 0 prints; the other ranks' output goes nowhere, and they need not import Rich for that: 25 ms each."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, cast

from clcomm.communicator import Communicator

if TYPE_CHECKING:
    from rich.console import Console

#: Characters in a line where output goes to a file or a pipe: no table is squeezed there.
PLAIN_WIDTH = 120


class Silent:
    """A console that prints nothing."""

    is_terminal = False
    width = PLAIN_WIDTH

    def print(self, *objects: Any, **style: Any) -> None:
        """Print nothing."""


def make_console(comm: Communicator) -> Console:
    """Return rank 0's console, or one that is silent on the other ranks."""
    if comm.rank != 0:
        return cast("Console", Silent())
    from rich.console import Console

    # Open MPI gives each rank a terminal of its own, and passes on whole lines, wherever its own output goes.
    if sys.stdout.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return Console(soft_wrap=True)
    columns = os.environ.get("COLUMNS", "")  # mpiexec's ranks have no terminal that could tell
    width = int(columns) if columns.isdecimal() else PLAIN_WIDTH
    return Console(soft_wrap=True, width=width, force_terminal=False if sys.stdout.isatty() else None)
