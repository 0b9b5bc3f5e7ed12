"""Exposed time of all-reduces in the background: the caller was in a call to one and could do nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from clcomm.transport.pending import Span

#: Calls with shorter gaps count as one: a loop that polls `done()` does nothing else in between.
_LOOP_S = 2e-6
#: Bounds memory: from so many spans on, gaps count as exposed.
_MOST = 4096


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
