"""When a rank was in calls of all-reduces that go on in the background, where it could do nothing else."""

from __future__ import annotations

#: Who comes back sooner did nothing in between: a loop that asks whether the result is there is one visit.
_LOOP_S = 2e-6
#: Memory stays bounded: from so many on, who comes that often counts as staying.
_MOST = 4096


class Visits:
    """Stretches of time, (begin, end) by time.perf_counter(), in order; one log for all that is on its way."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def add(self, begin_s: float, end_s: float) -> None:
        """Note a visit that is over."""
        spans = self._spans
        if spans and (begin_s - spans[-1][1] < _LOOP_S or len(spans) == _MOST):
            spans[-1] = spans[-1][0], end_s
        else:
            spans.append((begin_s, end_s))

    def take_since(self, begin_s: float) -> tuple[tuple[float, float], ...]:
        """Return the visits from a moment on, the first one cut to it, and forget all."""
        taken = tuple((max(begin_s, begin), end) for begin, end in self._spans if end > begin_s)
        self._spans.clear()
        return taken
