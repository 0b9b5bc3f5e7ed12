"""The order in which backward completes a model's gradients, observed in the first steps."""

from __future__ import annotations

from collections.abc import Callable

from clcomm.comm.communicator import Communicator
from clcomm.sync.adapters.adapter import ModelAdapter
from clcomm.sync.agreement import CHECKS

#: Synchronisations without a backward that can be observed, after which the search ends.
_MOST_SYNCHRONISATIONS = 2


class CompletionOrder:
    """Notes the order in which gradients become complete, until rank 0 has seen a backward; all ranks take rank 0's.

    Models of several libraries may be in one job, of which only some report it: all ranks look equally long.

    names: the parameters in that order; empty until it is known, and where the library does not report completion
    (`is_reported`). is_open: whether the order is still being looked for. accumulates: whether several backwards ran
    before a synchronisation, outside `no_sync()`. is_paused: whether gradients are to accumulate; settable.
    """

    def __init__(self, comm: Communicator, adapter: ModelAdapter, is_paused: bool = False):
        self.names: tuple[str, ...] = ()
        self.accumulates, self.is_paused = False, is_paused
        self._comm = comm
        self._seen: dict[str, None] = {}
        self._sent: set[str] = set()
        self._synchronisations = 0
        self._stop: Callable[[], None] | None = adapter.watch_gradients(self._note)
        self.is_reported, self.is_open = self._stop is not None, True

    def _note(self, name: str) -> None:
        self._seen.setdefault(name)
        if not self.is_paused:
            self.accumulates |= name in self._sent
            self._sent.add(name)

    def close(self) -> bool:
        """Take the order that rank 0 saw, after a synchronisation; return whether the search is over. Collective."""
        self._synchronisations += 1
        self._sent.clear()
        self.names = tuple(self._comm.broadcast_object(list(self._seen), label=CHECKS))
        if self.names or self._synchronisations == _MOST_SYNCHRONISATIONS:
            self.is_open = False
            if self._stop is not None:
                self._stop()
        return not self.is_open
