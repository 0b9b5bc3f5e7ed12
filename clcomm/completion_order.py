"""The order in which backward really completes a model's gradients, seen in the first step."""

from __future__ import annotations

from collections.abc import Callable

from clcomm.communicator import Communicator
from clcomm.replica import Replica

#: Synchronisations after which nobody waits for a backward that can be followed any longer.
_PATIENCE = 2


class CompletionOrder:
    """Notes the order in which gradients become complete, until rank 0 has seen a backward; all ranks take rank 0's.

    names: in that order; empty until it is known. It stays so for a library that does not tell. is_told: whether it
    does.
    """

    def __init__(self, comm: Communicator, replica: Replica):
        self.names: tuple[str, ...] = ()
        self._comm = comm
        self._seen: dict[str, None] = {}
        self._asked = 0
        self._stop: Callable[[], None] | None = replica.watch_gradients(self._note)
        self.is_told = self._stop is not None

    @property
    def is_open(self) -> bool:
        """Whether the order is still being looked for."""
        return self._stop is not None

    def _note(self, name: str) -> None:
        self._seen.setdefault(name)

    def close(self) -> bool:
        """Take the order that rank 0 saw, after a synchronisation, and say whether the search is over; collective."""
        self._asked += 1
        self.names = tuple(self._comm.broadcast_object(list(self._seen), label="checks"))
        if (self.names or self._asked == _PATIENCE) and self._stop is not None:
            self._stop()
            self._stop = None
        return not self.is_open
