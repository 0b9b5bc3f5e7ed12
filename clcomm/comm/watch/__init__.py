"""Start, stalls and end of a job's processes: exit codes, watchdogs, and one message for each failure."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clcomm.comm.stats.events import note_samples
    from clcomm.comm.watch.endings import note_saved, note_step, run

__all__ = ["note_samples", "note_saved", "note_step", "run"]

#: The module of each name, imported at the first access: a Communicator of one rank needs none of them.
_MODULES = {
    "note_samples": "stats.events", "note_saved": "watch.endings", "note_step": "watch.endings", "run": "watch.endings",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` at its first access."""
    if name not in _MODULES:
        raise AttributeError(f"module 'clcomm.comm.watch' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"clcomm.comm.{_MODULES[name]}"), name)
    return value
