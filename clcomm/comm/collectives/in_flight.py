"""Who is told of collectives, and those in flight: handles, exposed time, and whether all ranks started the same.

Time is exposed while the caller is in a call to one and can do nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from clcomm.comm.stats.events import PACKING, Call, Collective, Observer, Phase, TimedPhase
from clcomm.comm.transport.pending import Pending, Span
from clcomm.comm.transport.rendezvous import UNKNOWN, DifferentOperations, Rendezvous, last_of

if TYPE_CHECKING:
    from clcomm.comm.transport.pending import StartOrder

T = TypeVar("T")

#: Calls with shorter gaps count as one: a loop that polls `done()` does nothing else in between.
_LOOP_S = 2e-6
#: Bounds memory: from so many spans on, gaps count as exposed.
_MOST = 4096
#: What ranks that come to a rendezvous from such an operation add to its tag: no array has this length and dtype.
_IN_BACKGROUND = 63


class ExposedTime:
    """Spans of time, (begin, end) by time.perf_counter(), in order; one log for all collectives in flight."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque()
        #: Total length of all spans so far, including those already taken.
        self.seconds = 0.0

    def add(self, begin_s: float, end_s: float) -> None:
        """Record a call that has returned."""
        spans = self._spans
        if spans and (begin_s - spans[-1][1] < _LOOP_S or len(spans) == _MOST):
            self.seconds += end_s - spans[-1][1]
            spans[-1] = spans[-1][0], end_s
        else:
            self.seconds += end_s - begin_s
            spans.append((begin_s, end_s))

    def take(self, begin_s: float, end_s: float) -> tuple[Span, ...]:
        """Return the spans between two times, cut to them, and drop everything up to the second."""
        spans, taken = self._spans, []
        while spans and spans[0][0] < end_s:  # the first ones alone: there may be thousands behind them
            begin, end = spans.popleft()
            if end > end_s:
                spans.appendleft((end_s, end))
            if max(begin, begin_s) < min(end, end_s):
                taken.append((max(begin, begin_s), min(end, end_s)))
        return tuple(taken)


def intersection(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """Return the intersection of two sets of spans; those of one set do not overlap."""
    others = tuple(others)
    cut = ((max(begin, start), min(end, stop)) for begin, end in spans for start, stop in others)
    return tuple((begin, end) for begin, end in cut if begin < end)


class _StartedCall(NamedTuple):
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
        self._started: deque[_StartedCall] = deque()
        self._idle_from_s = 0.0  # when the last of them was complete

    def add(
        self, call: Call, sequence: int, began_s: float, pending: Pending, notify: Callable[[Collective], object]
    ) -> None:
        """Record a started all-reduce; `notify` is called with its event once a call finds it complete."""
        self._started.append(_StartedCall(call, sequence, began_s, pending, notify))

    def unfinished(self) -> list[tuple[Call, int]]:
        """Return the started all-reduces that no call has found complete, with their numbers."""
        return [(each.call, each.sequence) for each in self._started.copy()]

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

    def _event(self, started: _StartedCall) -> Collective:
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
            exposed, waits, shape=call.extent, dtype=call.dtype_name,
        )  # fmt: skip


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


class Handle:
    """A started all-reduce: `wait()` returns its result, `done()` returns without blocking whether it is complete.

    Args:
        pending: the operation.
        result: what `wait` returns: an array, or a list of them.
        began_s: when the caller entered the call that started it (perf_counter).
        in_flight: records that call, and each call of `wait` and `done`.
        waiting: returns a context for the time in which the caller blocks, for the watchdog.
        computes: returns whether the caller's device is computing; a call counts as hidden if it is when the call ends.
        keeps: what lives as long as this: the Communicator and the arrays.
    """

    def __init__(
        self,
        pending: Pending,
        result: object,
        began_s: float,
        in_flight: InFlightTimes,
        waiting: Callable[[], AbstractContextManager[None]],
        computes: Callable[[], bool] | None = None,
        *,
        keeps: object = None,
    ):
        self._pending, self._result, self._keeps = pending, result, keeps
        self._in_flight, self._waiting, self._computes = in_flight, waiting, computes
        self._record(began_s, time.perf_counter())

    def wait(self) -> Any:
        """Block until the result is complete on this rank, and return it."""
        with self._waiting():
            self._timed(self._pending.wait)
        return self._result

    def done(self) -> bool:
        """Make progress and return whether the result is complete."""
        return self._timed(self._pending.done)

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, which `wait` raises."""
        return self._pending.failed

    def _timed(self, advance: Callable[[], T]) -> T:
        if self._pending.finished:
            self._in_flight.report_finished()
            return advance()
        begin_s = time.perf_counter()
        try:
            return advance()
        finally:
            self._record(begin_s, time.perf_counter())

    def _record(self, begin_s: float, end_s: float) -> None:
        is_hidden = self._computes is not None and self._computes()
        self._in_flight.add_call(begin_s, end_s, is_hidden=is_hidden)


class StartGuard:
    """Finds ranks that came to another operation: `clcomm.comm.transport.pending.Guard`.

    Args:
        rendezvous: at which ranks compare their blocking calls.
        order: what the ranks of the host have started; None: the transport compares that itself.
        number: of this operation.
        tag: of this operation, which ranks compare.
        settle: as Guard's.
        left: returns another `settle` where a rank has left this operation for another Communicator's; else None.
    """

    def __init__(
        self, rendezvous: Rendezvous, order: StartOrder | None, number: int, tag: int, settle: Callable[[], Exception],
        left: Callable[[StartOrder], Callable[[], Exception] | None],
    ):  # fmt: skip
        self._rendezvous, self._order = rendezvous, order
        self._number, self._tag, self.settle, self._left = number, tag, settle, left

    def look(self) -> None:
        """Raise DifferentOperations if ranks wait in different operations.

        All then come to a rendezvous: those in blocking calls are there, and the others find out in the same way.
        """
        if self._order is None:
            return
        if self._order.differs(self._number, self._tag):
            self._rendezvous.announce(self._tag)
            self._rendezvous.barrier(_IN_BACKGROUND)
        elif (settle := self._left(self._order)) is not None:
            self.settle = settle
            raise DifferentOperations
