"""Ranks that wait for their turn under `clcomm run --min-ranks` do beforehand what their first step would do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from clcomm.comm.communicator import Communicator
from clcomm.comm.watch.worlds import ThisWorld
from training.console import make_console, make_silent
from training.engines.rehearsal import Rehearsal

if TYPE_CHECKING:
    from rich.console import Console

#: What resuming and training import when they need it.
_MODULES = "clcomm.parallel.tensor_parallel.shards", "training.progress_display"


def console_of(comm: Communicator) -> Console:
    """Return the console of a session's start, which is silent while other ranks train."""
    return make_silent() if ThisWorld().waits else make_console(comm)


def prepare(rehearse: Callable[[], Rehearsal] | None) -> None:
    """Import modules, and build all kernels of the run in this process, where it has to wait; not collective.

    rehearse: returns the kernels of the run; None: it has none.
    """
    if not ThisWorld().waits:
        return
    for name in _MODULES:
        importlib.import_module(name)
    if rehearse is not None:
        rehearsal = rehearse()
        rehearsal.build(rehearsal.programs)
        rehearsal.close()
