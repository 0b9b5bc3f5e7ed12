"""The order in which backward really completes a model's gradients, seen in the first step."""

from __future__ import annotations

from collections.abc import Callable

from clcomm.agreement import CHECKS
from clcomm.communicator import Communicator
from clcomm.replica import Replica

#: Synchronisations after which nobody waits for a backward that can be followed any longer.
_PATIENCE = 2


class CompletionOrder:
    """Notes the order in which gradients become complete, until rank 0 has seen a backward; all ranks take rank 0's.

    is_paused: whether gradients are to accumulate. names: in that order; empty until it is known, and for a library
    that does not tell (`is_told`). is_open: whether it is still looked for. accumulates: whether several backwards ran
    before a synchronisation without being told to accumulate.
    """

    def __init__(self, comm: Communicator, replica: Replica, is_paused: Callable[[], bool]):
        self.names: tuple[str, ...] = ()
        self.accumulates = False
        self._comm, self._is_paused = comm, is_paused
        self._seen: dict[str, None] = {}
        self._sent: set[str] = set()
        self._asked = 0
        self._stop: Callable[[], None] | None = replica.watch_gradients(self._note)
        self.is_told = self.is_open = self._stop is not None

    def _note(self, name: str) -> None:
        self._seen.setdefault(name)
        if not self._is_paused():
            self.accumulates |= name in self._sent
            self._sent.add(name)

    def close(self) -> bool:
        """Take the order that rank 0 saw, after a synchronisation, and say whether the search is over; collective."""
        self._asked += 1
        self._sent.clear()
        self.names = tuple(self._comm.broadcast_object(list(self._seen), label=CHECKS))
        if (self.names or self._asked == _PATIENCE) and self._stop is not None:
            self._stop()
            self.is_open = False
        return not self.is_open
