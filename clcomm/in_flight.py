"""All-reduces in the background, as the stats see them: whose turn it is, and what of it kept the rank waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from clcomm.call import Call
from clcomm.events import Collective, last_of
from clcomm.transport import Pending
from clcomm.visits import Visits, common


class _Begun(NamedTuple):
    call: Call
    sequence: int
    began_s: float
    pending: Pending
    tell: Callable[[Collective], object]


class InFlight:
    """Takes note of all-reduces that begin and of the rank's visits to them, and tells of each that is done.

    They are done in the order in which they began. One's turn comes when that before it is done; it ends when a visit
    finds it done, whichever it was made for.
    """

    def __init__(self) -> None:
        self._visits = Visits()
        self._begun: deque[_Begun] = deque()
        self._idle_from_s = 0.0  # when the last of them was done

    @property
    def exposed_s(self) -> float:
        """The seconds in which the rank was in such calls, so far."""
        return self._visits.seconds

    def begin(
        self, call: Call, sequence: int, began_s: float, pending: Pending, tell: Callable[[Collective], object]
    ) -> None:
        """Note an all-reduce; `tell` is told about it in the visit that finds it done."""
        self._begun.append(_Begun(call, sequence, began_s, pending, tell))

    def visited(self, begin_s: float, end_s: float, *, is_hidden: bool = False) -> None:
        """Note a visit that is over; is_hidden: the rank's device computed meanwhile."""
        if not is_hidden:
            self._visits.add(begin_s, end_s)
        self.tell_finished()

    def tell_finished(self) -> None:
        """Notify of what is done: waiting for an operation of another Communicator may have completed it."""
        while self._begun and self._begun[0].pending.finished:
            begun = self._begun.popleft()
            begun.tell(self._event(begun))

    def _event(self, begun: _Begun) -> Collective:
        call, pending = begun.call, begun.pending
        end = pending.finished_s
        turn = min(end, max(begun.began_s, self._idle_from_s))
        self._idle_from_s = end
        exposed = self._visits.take(turn, end)
        waits = common(exposed, pending.waits or ())
        last_rank, late_s = -1, 0.0
        if pending.arrivals is not None:
            last_rank, late_s = last_of(pending.arrivals)
        return Collective(
            call.operation, call.label, call.nbytes, end - turn, call.transport, begun.sequence, pending.failed, None,
            call.bucket, turn, None if pending.waits is None else sum(stop - begin for begin, stop in waits),
            min(end - turn, sum(stop - begin for begin, stop in exposed)), last_rank, late_s, turn - begun.began_s,
            exposed, waits,
        )  # fmt: skip
