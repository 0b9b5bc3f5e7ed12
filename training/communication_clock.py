"""An observer that says how long collectives kept a rank from anything else."""

from __future__ import annotations

from clcomm.stats import Collective
from clcomm.synchronizer import GRADIENTS


class CommunicationClock:
    """Adds up the seconds in which a rank could only wait for collectives, and notes what moved the gradients."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.moved_by: set[str] = set()

    def collective_finished(self, event: Collective) -> None:
        self.seconds += event.seconds if event.exposed_s is None else event.exposed_s
        if event.label == GRADIENTS:
            self.moved_by.add(event.transport)


class Lap:
    """Reads a clock in parts."""

    def __init__(self, clock: CommunicationClock):
        self._clock, self._seen_s = clock, clock.seconds

    def seconds(self) -> float:
        """Return what has been added since the last call, or since this was made."""
        before_s, self._seen_s = self._seen_s, self._clock.seconds
        return self._seen_s - before_s
