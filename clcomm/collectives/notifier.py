"""Observer notification: finished collectives, messages and phases, and the time that this rank was blocked in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from clcomm.collectives.in_flight import InFlightTimes
from clcomm.stats.events import PACKING, Collective, Observer, Phase, TimedPhase


class Notifier:
    """Notifies a Communicator's observers, of which its statistics are the first.

    `Communicator` describes the methods that have the names of its own.

    Args:
        observers: the first ones, in this order.

    Attributes:
        in_flight: the collectives in the background.
        blocked_s: time in blocking collectives.
        finished: the observers' functions for a finished collective.
    """

    def __init__(self, observers: Iterable[Observer]):
        self.in_flight = InFlightTimes()
        self._exposed = self.in_flight.exposed
        self.blocked_s = 0.0
        self._packed_s = 0.0  # time in packing for collectives
        self._observe([*observers])

    def add_observer(self, observer: Observer) -> None:
        """See `Communicator.add_observer`."""
        self._observe([*self._observers, observer])

    def remove_observer(self, observer: Observer) -> None:
        """See `Communicator.remove_observer`."""
        self._observe([other for other in self._observers if other is not observer])

    def _observe(self, observers: list[Observer]) -> None:
        self._observers = observers
        self.finished: list[Callable[[Collective], object]] = [each.collective_finished for each in observers]
        self._phase_finished = [each.phase_finished for each in observers if hasattr(each, "phase_finished")]

    def notify_phase(self, phase: Phase) -> None:
        """See `Communicator.notify_phase`."""
        if phase[0] in PACKING:
            self._packed_s += phase[2]
        for finished in self._phase_finished:
            finished(phase)

    def notify_collective(self, event: Collective, *, blocked_s: float = 0.0) -> None:
        """Notify the observers of a collective of another Communicator, which counts as this one's.

        blocked_s: how long this thread could do nothing else, to be counted in `communicated`.
        """
        self.blocked_s += blocked_s
        self.notify(event)

    def notify_message(self, event: Collective) -> None:
        """Notify the observers of a message from rank to rank; its exposed time counts as communication."""
        self.blocked_s += event.exposed_s or 0.0
        self.notify(event)

    def phase(self, name: str, label: str, bucket: int, figures: Mapping[str, float]) -> TimedPhase:
        """See `Communicator.phase`."""
        shown = tuple(figures.items()) if figures else ()
        return TimedPhase(self.notify_phase, self.communicated, name, label, bucket, shown)

    def communicated(self) -> float:
        """See `Communicator.communicated`."""
        return self.blocked_s + self._packed_s + self._exposed.seconds

    def in_collectives(self) -> float:
        """See `Communicator.in_collectives`."""
        return self.blocked_s + self._exposed.seconds

    def notify(self, event: Collective) -> None:
        """Notify the observers of a finished collective."""
        for finished in self.finished:
            finished(event)
