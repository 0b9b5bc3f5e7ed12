"""The console of rank 0; other ranks print nothing and do not import Rich, which takes 25 ms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from clcomm.base.console.terminal import PLAIN_WIDTH
from clcomm.comm.communicator import Communicator

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
        return make_silent()
    from clcomm.base.console import output

    return output.make_console()


def make_silent() -> Console:
    return cast("Console", Silent())
