"""Times of all-reduces in the background: when each had its turn, and how much of that was exposed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from clcomm.collectives.exposed_time import ExposedTime, intersection
from clcomm.stats.call import Call
from clcomm.stats.events import Collective
from clcomm.transport import Pending
from clcomm.transport.meeting import UNKNOWN, last_of


class _Started(NamedTuple):
    call: Call
    sequence: int
    began_s: float
    pending: Pending
    notify: Callable[[Collective], object]


class InFlightTimes:
    """Records started all-reduces and the rank's calls to their handles, and reports each that is complete.

    They complete in the order in which they were started. An all-reduce's turn begins when the one before it is
    complete, and ends when any call finds it complete.
    """

    def __init__(self) -> None:
        #: The rank's calls to their handles; its `seconds` are those spent in them so far.
        self.exposed = ExposedTime()
        self._started: deque[_Started] = deque()
        self._idle_from_s = 0.0  # when the last of them was complete

    def add(
        self, call: Call, sequence: int, began_s: float, pending: Pending, notify: Callable[[Collective], object]
    ) -> None:
        """Record a started all-reduce; `notify` is called with its event once a call finds it complete."""
        self._started.append(_Started(call, sequence, began_s, pending, notify))

    def add_call(self, begin_s: float, end_s: float, *, is_hidden: bool = False) -> None:
        """Record a call that has returned; is_hidden: the rank's device was computing meanwhile."""
        if not is_hidden:
            self.exposed.add(begin_s, end_s)
        self.report_finished()

    def report_finished(self) -> None:
        """Report complete all-reduces, which a wait of another Communicator may have completed too."""
        while self._started and self._started[0].pending.finished:
            started = self._started.popleft()
            started.notify(self._event(started))

    def _event(self, started: _Started) -> Collective:
        call, pending = started.call, started.pending
        end = pending.finished_s
        turn = min(end, max(started.began_s, self._idle_from_s))
        self._idle_from_s = end
        exposed = self.exposed.take(turn, end)
        waits = intersection(exposed, pending.waits or ())
        last_rank, late_s = UNKNOWN if pending.arrivals is None else last_of(pending.arrivals)
        return Collective(
            call.operation, call.label, call.nbytes, end - turn, call.transport, started.sequence, pending.failed, None,
            call.bucket, turn, None if pending.waits is None else sum(stop - begin for begin, stop in waits),
            min(end - turn, sum(stop - begin for begin, stop in exposed)), last_rank, late_s, turn - started.began_s,
            exposed, waits,
        )  # fmt: skip
