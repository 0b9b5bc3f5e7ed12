"""When a rank was in calls of all-reduces that go on in the background, where it could do nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from clcomm.transport.pending import Span

#: Who comes back sooner did nothing in between: a loop that asks whether the result is there is one visit.
_LOOP_S = 2e-6
#: Memory stays bounded: from so many on, who comes that often counts as staying.
_MOST = 4096


class Visits:
    """Stretches of time, (begin, end) by time.perf_counter(), in order; one log for all that is on its way."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        #: How long all visits together took, those forgotten too.
        self.seconds = 0.0

    def add(self, begin_s: float, end_s: float) -> None:
        """Note a visit that is over."""
        spans = self._spans
        if spans and (begin_s - spans[-1][1] < _LOOP_S or len(spans) == _MOST):
            self.seconds += end_s - spans[-1][1]
            spans[-1] = spans[-1][0], end_s
        else:
            self.seconds += end_s - begin_s
            spans.append((begin_s, end_s))

    def take(self, begin_s: float, end_s: float) -> tuple[Span, ...]:
        """Return the visits between two moments, cut to them, and forget all up to the second."""
        taken = common(self._spans, [(begin_s, end_s)])
        self._spans = [(max(begin, end_s), end) for begin, end in self._spans if end > end_s]
        return taken


def common(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """Return what lies in some span of the first and in some of the second, which do not overlap among themselves."""
    others = tuple(others)
    cut = ((max(begin, start), min(end, stop)) for begin, end in spans for start, stop in others)
    return tuple((begin, end) for begin, end in cut if begin < end)
