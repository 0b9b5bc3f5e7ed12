"""Where rank 0 prints; the other ranks' output goes nowhere, and they need not import Rich for that: 25 ms each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from clcomm.communicator import Communicator
from clcomm.terminal import PLAIN_WIDTH

if TYPE_CHECKING:
    from rich.console import Console


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
    from clcomm import console

    return console.make_console()
