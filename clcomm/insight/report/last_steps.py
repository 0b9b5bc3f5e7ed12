"""A rank's last steps, event by event, for a report's timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from clcomm.comm.stats.events import PACKING, Collective, Phase
from clcomm.sync.agreement import CHECKS
from clcomm.sync.clipping import CLIPPING
from clcomm.sync.decision import TUNING

#: The number of steps that are kept, and the most events and spans of each.
STEPS, MOST_EVENTS, MOST_SPANS = 3, 400, 1600


STEP = "step"


#: Parts of a collective: HIDDEN overlaps with computing, EITHER is waiting or moving, not known which.
WAIT, MOVE, EITHER, HIDDEN = "wait", "move", "either", "hidden"


#: Labels of collectives whose moving is shown apart from that of gradients.
OTHER_LABELS = (CHECKS, TUNING, CLIPPING)


#: Phases within steps that a timeline shows; clipping is a label as well.
PHASES = ("data", "forward_backward", "sync", "loss", CLIPPING, "optimizer", *PACKING)


_KEPT = frozenset(PHASES)


#: Every kind of span.
KINDS = (STEP, *PHASES, CHECKS, TUNING, WAIT, MOVE, EITHER, HIDDEN)


class Span(NamedTuple):
    """A stretch of a rank's time: its kind, the bucket (-1: none), begin and end in ns of rank 0's clock."""

    kind: str
    bucket: int
    begin_ns: int
    end_ns: int


class LastSteps:
    """An observer that keeps the events of a rank's last steps and discards older ones.

    A step ends with the Communicator's phase "step". Of a step with more than MOST_EVENTS the last ones are kept, as
    its begin is known only at its end.
    """

    def __init__(self) -> None:
        self._events: deque[Collective | Phase] = deque(maxlen=MOST_EVENTS)
        self._steps: deque[tuple[Phase, list[Collective | Phase]]] = deque(maxlen=STEPS)

    def collective_finished(self, event: Collective) -> None:
        self._events.append(event)

    def phase_finished(self, phase: Phase) -> None:
        if phase.name == STEP:
            self._steps.append((phase, [event for event in self._events if event.began_s >= phase.began_s]))
            self._events.clear()
        elif phase.name in _KEPT:
            self._events.append(phase)

    def spans(self) -> Iterator[Span]:
        """Yield the spans of the kept steps, by this rank's clock; a step precedes the spans within it.

        At most MOST_SPANS per step: a collective with more stretches than are left is left out.
        """
        for step, events in self._steps:
            yield _span(STEP, -1, step.began_s, step.began_s + step.seconds)
            left = MOST_SPANS
            for event in events:
                found = [*(_of_phase(event) if isinstance(event, Phase) else _of_collective(event))]
                if len(found) <= left:  # a collective is shown whole or not at all: a part would look hidden
                    left -= len(found)
                    yield from found

    def texts(self, offset_ns: int) -> list[str]:
        """Return the spans as texts, "kind bucket begin length"; `offset_ns` is rank 0's clock less this rank's."""
        return [f"{s.kind} {s.bucket} {s.begin_ns + offset_ns} {s.end_ns - s.begin_ns}" for s in self.spans()]


def parse_span(text: str) -> Span:
    """Return the span of a text made by `texts`; raises ValueError for any other text."""
    kind, *numbers = text.split(" ")
    if kind not in KINDS or len(numbers) != 3 or not all(number.lstrip("-").isdecimal() for number in numbers):
        raise ValueError(f"expected a kind, a bucket, a begin and a length, got {text[:60]!r}")
    bucket, begin, length = map(int, numbers)
    if bucket < -1 or length < 0 or abs(begin) >= 1 << 62 or length >= 1 << 62:
        raise ValueError(f"expected a bucket from -1 up and a length from 0 up, got {text[:60]!r}")
    return Span(kind, bucket, begin, begin + length)


def _span(kind: str, bucket: int, begin_s: float, end_s: float) -> Span:
    return Span(kind, bucket, round(begin_s * 1e9), max(round(begin_s * 1e9), round(end_s * 1e9)))


def _of_phase(phase: Phase) -> Iterator[Span]:
    yield _span(phase.name, phase.bucket, phase.began_s, phase.began_s + phase.seconds)


def _of_collective(event: Collective) -> Iterator[Span]:
    bucket, begin_s, end_s = event.bucket, event.began_s, event.began_s + event.seconds
    moving = event.label if event.label in OTHER_LABELS else MOVE
    if event.exposed_s is not None:
        yield _span(HIDDEN, bucket, begin_s, end_s)
        yield from (_span(EITHER if event.wait_s is None else moving, bucket, *span) for span in event.exposed)
        yield from (_span(WAIT, bucket, *span) for span in event.waits)
    elif event.wait_s is None:
        yield _span(EITHER, bucket, begin_s, end_s)
    else:
        yield _span(WAIT, bucket, begin_s, begin_s + event.wait_s)
        yield _span(moving, bucket, begin_s + event.wait_s, end_s)


def uncovered(span: Span, by: list[Span]) -> list[Span]:
    """Return the parts of a span that none of the spans in `by` covers, in order of time."""
    begin, found = span.begin_ns, []
    for each in sorted(by, key=lambda other: other.begin_ns):
        if each.begin_ns > begin:
            found.append(span._replace(begin_ns=begin, end_ns=min(each.begin_ns, span.end_ns)))
        begin = max(begin, each.end_ns)
        if begin >= span.end_ns:
            return [each for each in found if each.begin_ns < each.end_ns]
    return [each for each in [*found, span._replace(begin_ns=begin)] if each.begin_ns < each.end_ns]


#: Of several spans at the same time, the one whose kind comes last here is shown.
_ORDER = (
    HIDDEN,
    STEP,
    "sync",
    "loss",
    "data",
    "forward_backward",
    "optimizer",
    *PACKING,
    EITHER,
    *OTHER_LABELS,
    MOVE,
    WAIT,
)


def flattened(spans: list[Span], of: Callable[[str], str] = str) -> list[Span]:
    """Return a rank's consecutive spans, without hidden communication.

    `of` maps kinds to the names to show; neighbours with one name and bucket are merged.
    """
    shown = [span for span in spans if span.kind != HIDDEN and span.end_ns > span.begin_ns]
    changes = sorted({moment for span in shown for moment in (span.begin_ns, span.end_ns)})
    upcoming = sorted(shown, key=lambda span: span.begin_ns, reverse=True)
    active: list[Span] = []
    found: list[Span] = []
    for begin, end in pairwise(changes):
        active = [span for span in active if span.end_ns > begin]
        while upcoming and upcoming[-1].begin_ns <= begin:
            active.append(upcoming.pop())
        if not active:
            continue
        top = max(active, key=lambda span: (_ORDER.index(span.kind), span.begin_ns))
        name = of(top.kind)
        if found and found[-1][:2] == (name, top.bucket) and found[-1].end_ns == begin:
            found[-1] = found[-1]._replace(end_ns=end)
        else:
            found.append(Span(name, top.bucket, begin, end))
    return found
