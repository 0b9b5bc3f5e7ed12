"""How a collective runs: what was started before is completed, the call timed and counted, the observers told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from clcomm.errors import ArgumentError
from clcomm.stats import Collective, CommStats, Observer, Phase
from clcomm.transport import Transport
from clcomm.world import World


class CollectiveRunner:
    """The part of the Communicator, which inherits it, that every collective goes through."""

    def __init__(self, world: World, observers: Iterable[Observer]):
        self.comm, self._base, self._shared = world.comm, world.base, world.shared
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.host, self.hosts, self.cores = world.host, world.hosts, world.cores
        self.rank, self.size = self._base.rank, self._base.world_size
        self._pending = world.pending
        self._finalized = False
        self._sequence = 0
        self._parts: list[Collective] | None = None  # collectives that count as parts of another
        self.stats = CommStats(self.size)
        self._observers: list[Observer] = []
        self._phase_observers: list[Callable[[Phase], None]] = []
        for observer in (self.stats, *observers):
            self.add_observer(observer)

    def add_observer(self, observer: Observer) -> None:
        """Tell an observer about every collective that finishes from now on, and about phases if it wants them."""
        self._observers.append(observer)
        if hasattr(observer, "phase_finished"):
            self._phase_observers.append(observer.phase_finished)

    def remove_observer(self, observer: Observer) -> None:
        """Tell an observer nothing any more; one that was never told is none's loss."""
        self._observers = [other for other in self._observers if other is not observer]
        self._phase_observers = [each.phase_finished for each in self._observers if hasattr(each, "phase_finished")]

    def tell_phase(self, phase: Phase) -> None:
        """Hand a finished part of the program to the observers that have a method `phase_finished`."""
        for finished in self._phase_observers:
            finished(phase)

    def _run(
        self, operation: str, label: str, nbytes: int, transport: Transport, move: Callable[[], Any], bucket: int = -1
    ) -> Any:
        self._settle()
        sequence = self._next_sequence()
        failed = True
        begin = time.perf_counter()
        try:
            result = move()
            failed = False
            return result
        finally:
            seconds = time.perf_counter() - begin
            self._tell(
                Collective(operation, label, nbytes, seconds, transport.name, sequence, failed, None, bucket, begin)
            )

    def _settle(self) -> None:
        """Complete what was started before a blocking call.

        A started all-reduce has a second phase that each rank begins while it waits for it. Were this rank to block
        in another call first, ranks that wait for the all-reduce before that call would wait for this one, and it
        for them.
        """
        self._require_open()
        while self._pending:
            self._pending[0].wait()

    def _require_open(self) -> None:
        if self._finalized:
            raise ArgumentError("Communicator: expected an open one, but finalize() was called; make a new one")

    def _tell(self, event: Collective) -> None:
        if self._parts is not None:
            self._parts.append(event)
            return
        for observer in self._observers:
            observer.collective_finished(event)

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _transport_for(self, *arrays: np.ndarray) -> Transport:
        if self._shared is not None and self._shared.holds(*arrays):
            return self._shared
        return self._base
