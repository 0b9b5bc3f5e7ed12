"""Observer notification: finished collectives, messages and phases, and the time that this rank was blocked in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clcomm.collectives.in_flight import InFlightTimes
from clcomm.stats.comm_stats import CommStats
from clcomm.stats.events import PACKING, Collective, Observer, Phase, TimedPhase


class Notifier:
    """Notifies the Communicator's observers, of which its statistics are the first (a base class of it)."""

    def __init__(self, stats: CommStats, observers: Iterable[Observer]):
        self._in_flight = InFlightTimes()
        self._exposed = self._in_flight.exposed
        self._blocked_s = self._packed_s = 0.0  # time in blocking collectives, and in packing for them
        self.stats = stats
        self._observe([stats, *observers])

    def add_observer(self, observer: Observer) -> None:
        """Notify an observer of collectives that finish from now on, and of phases if it has `phase_finished`."""
        self._observe([*self._observers, observer])

    def remove_observer(self, observer: Observer) -> None:
        """Stop notifying an observer; no-op if it was never added."""
        self._observe([other for other in self._observers if other is not observer])

    def _observe(self, observers: list[Observer]) -> None:
        self._observers = observers
        self._finished: list[Callable[[Collective], object]] = [each.collective_finished for each in observers]
        self._phase_finished = [each.phase_finished for each in observers if hasattr(each, "phase_finished")]

    def notify_phase(self, phase: Phase) -> None:
        """Notify the observers that have a method `phase_finished` of a finished phase."""
        if phase[0] in PACKING:
            self._packed_s += phase[2]
        for finished in self._phase_finished:
            finished(phase)

    def notify_collective(self, event: Collective, *, blocked_s: float = 0.0) -> None:
        """Notify the observers of a collective of another Communicator, which counts as this one's.

        blocked_s: how long this thread could do nothing else, to be counted in `communicated`.
        """
        self._blocked_s += blocked_s
        self._notify(event)

    def notify_message(self, event: Collective) -> None:
        """Notify the observers of a message from rank to rank; its exposed time counts as communication."""
        self._blocked_s += event.exposed_s or 0.0
        self._notify(event)

    def phase(self, name: str, label: str = "", bucket: int = -1, **figures: float) -> TimedPhase:
        """Return a context manager that reports its block as a phase: "step", "forward_backward" or any name.

        figures: shown with it in a timeline, such as step=7 and epoch=1.
        """
        shown = tuple(figures.items()) if figures else ()
        return TimedPhase(self.notify_phase, self.communicated, name, label, bucket, shown)

    def communicated(self) -> float:
        """Return the seconds that this rank has spent blocked in collectives and packing for them."""
        return self._blocked_s + self._packed_s + self._exposed.seconds

    def in_collectives(self) -> float:
        """Return the seconds that this rank has spent blocked in collectives, without packing for them."""
        return self._blocked_s + self._exposed.seconds

    def _notify(self, event: Collective) -> None:
        for finished in self._finished:
            finished(event)
