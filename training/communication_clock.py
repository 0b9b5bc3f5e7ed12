"""An observer that adds up the time in which a rank could only wait for collectives."""

from __future__ import annotations

from clcomm.comm.stats.comm_stats import Collective
from clcomm.sync.synchronizer import GRADIENTS


class CommunicationClock:
    """Adds up a rank's exposed communication time, and collects the transports that carried gradients."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.moved_by: set[str] = set()

    def collective_finished(self, event: Collective) -> None:
        self.seconds += event.seconds if event.exposed_s is None else event.exposed_s
        if event.label == GRADIENTS:
            self.moved_by.add(event.transport)


class Lap:
    """Reads a clock's time in laps."""

    def __init__(self, clock: CommunicationClock):
        self._clock, self._seen_s = clock, clock.seconds

    def seconds(self) -> float:
        """Return the time since the last call, or since this was created."""
        before_s, self._seen_s = self._seen_s, self._clock.seconds
        return self._seen_s - before_s
