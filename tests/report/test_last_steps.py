"""What a report's timeline is made of: the events of the last steps, flattened so that each moment counts once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from clcomm.comm.stats.events import Collective, Phase
from clcomm.insight.report.last_steps import (
    KINDS,
    MOST_EVENTS,
    MOST_SPANS,
    STEPS,
    LastSteps,
    Span,
    flattened,
    parse_span,
)
from clcomm.insight.report.schema import checked_run
from tests.report.runs import document


def observed(*events: Collective | Phase) -> LastSteps:
    found = LastSteps()
    for event in events:
        (found.phase_finished if isinstance(event, Phase) else found.collective_finished)(event)
    return found


def a_step(began_s: float, of: int = 0) -> list[Collective | Phase]:
    """A step of 10 ms: data, backward, a bucket that waits and moves, the optimizer; `of` more collectives."""
    more = [Collective("barrier", "", 0, 1e-6, "shared", 0, began_s=began_s + 6e-3)] * of
    reduction = Collective(
        "all_reduce", "gradients", 64, 3e-3, "shared", 0, bucket=1, began_s=began_s + 5e-3, wait_s=2e-3
    )
    phases = [("data", 0, 1), ("forward_backward", 1, 4), ("sync", 5, 3), ("optimizer", 8, 1), ("step", 0, 10)]
    found = [Phase(name, began_s + at * 1e-3, length * 1e-3) for name, at, length in phases]
    return [*found[:2], reduction, *more, *found[2:]]


def test_the_last_steps_are_kept_and_what_is_between_steps_is_not() -> None:
    between = Collective("all_reduce", "metrics", 8, 1e-3, "shared", 0, began_s=4.9)
    found = observed(*(e for at in (1.0, 2.0, 3.0, 4.0) for e in a_step(at)), between, *a_step(5.0))
    spans = list(found.spans())
    steps = [span for span in spans if span.kind == "step"]
    assert [span.begin_ns for span in steps] == [at * 10**9 for at in (3, 4, 5)] and len(steps) == STEPS
    assert all(span.begin_ns < 4_900_000_000 or span.begin_ns >= 5_000_000_000 for span in spans)
    (wait,) = (span for span in spans if span.kind == "wait" and span.begin_ns > 5 * 10**9)
    assert wait == Span("wait", 1, 5_005_000_000, 5_007_000_000)


def test_a_step_of_any_number_of_events_keeps_so_many() -> None:
    assert len(list(observed(*a_step(1.0, of=5 * MOST_EVENTS)).spans())) <= 1 + 2 * MOST_EVENTS


def in_the_background(began_s: float, stretches: int) -> Collective:
    """A collective with so many exposed and as many waiting stretches, within 1 ms."""
    width_s = 1e-3 / (2 * stretches + 1)
    exposed = tuple((began_s + 2 * i * width_s, began_s + (2 * i + 1) * width_s) for i in range(stretches))
    waits = tuple((begin, (begin + end) / 2) for begin, end in exposed)
    return Collective(
        "all_reduce", "gradients", 64, 1e-3, "shared", 0, bucket=0, began_s=began_s, wait_s=1e-4, exposed_s=5e-4,
        exposed=exposed, waits=waits,
    )  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(20))
def test_a_report_of_any_number_of_stretches_can_be_read(seed: int) -> None:
    rng = random.Random(seed)
    most = 10 ** rng.randrange(1, 4)
    found = LastSteps()
    made = []
    for at in range(rng.randrange(1, 6)):
        events = [in_the_background(at + 1 + i * 1e-4, rng.randrange(1, most + 1)) for i in range(rng.randrange(600))]
        made.append(events)
        for event in events:
            found.collective_finished(event)
        found.phase_finished(Phase("step", at + 1, 0.9))
    run, spans = document(ranks=1), list(found.spans())
    run["ranks"][0]["timeline"] = found.texts(0)
    assert checked_run(run)["ranks"][0]["timeline"] == spans
    for events in made[-STEPS:]:  # each collective is there with all of its stretches, or not at all
        began_ns = int(events[0].began_s) * 10**9 if events else 0
        of_step = [s for s in spans if began_ns <= s.begin_ns < began_ns + 9 * 10**8 and s.kind != "step"]
        sizes = [1 + 2 * len(event.exposed) for event in events[-MOST_EVENTS:]]
        left, kept = MOST_SPANS, 0
        for size in sizes:
            kept, left = (kept + size, left - size) if size <= left else (kept, left)
        assert not events or len(of_step) == kept <= MOST_SPANS


@pytest.mark.parametrize("before", [0, 1, MOST_EVENTS - 1, MOST_EVENTS, 10 * MOST_EVENTS])
@pytest.mark.parametrize("name", ["epoch", "evaluation", "checkpoint", "loss", ""])
def test_what_is_between_two_steps_takes_no_place_of_the_next(name: str, before: int) -> None:
    """`name`: of the phases between the steps; "": collectives."""
    times = [2 + i * 1e-5 for i in range(before)]
    collectives = [Collective("barrier", "", 0, 1e-6, "shared", 0, began_s=began_s) for began_s in times]
    between = [Phase(name, began_s, 1e-6) for began_s in times] if name else collectives
    steps = a_step(1.0), a_step(3.0)
    assert list(observed(*steps[0], *between, *steps[1]).spans()) == list(observed(*steps[0], *steps[1]).spans())


@pytest.mark.parametrize("within", [1, MOST_EVENTS, 3 * MOST_EVENTS])
def test_phases_that_no_timeline_shows_take_no_place_within_a_step(within: int) -> None:
    step = a_step(1.0)
    unshown = [Phase("forward", 1.0 + i * 1e-6, 1e-7) for i in range(within)]
    assert list(observed(*step[:2], *unshown, *step[2:]).spans()) == list(observed(*step).spans())


def test_hidden_and_exposed_communication() -> None:
    event = Collective(
        "all_reduce", "gradients", 64, 4e-3, "shared", 0, bucket=0, began_s=1.002, wait_s=1e-3, exposed_s=2e-3,
        exposed=((1.004, 1.006),), waits=((1.004, 1.005),),
    )  # fmt: skip
    found = observed(Phase("forward_backward", 1.0, 4e-3), event, Phase("sync", 1.004, 2e-3), Phase("step", 1.0, 0.007))
    spans = list(found.spans())
    assert Span("hidden", 0, 1_002_000_000, 1_006_000_000) in spans
    flat = [(span.kind, span.begin_ns // 10**6 - 1000, span.end_ns // 10**6 - 1000) for span in flattened(spans)]
    assert flat == [("forward_backward", 0, 4), ("wait", 4, 5), ("move", 5, 6), ("step", 6, 7)]


@pytest.mark.parametrize("seed", range(40))
def test_flattened_spans_count_each_moment_once(seed: int) -> None:
    rng = random.Random(seed)
    whole = [Span("step", -1, 0, 1000)]
    parts = [Span(rng.choice(KINDS[1:]), rng.randrange(-1, 3), at := rng.randrange(900), at + rng.randrange(100))
             for _ in range(rng.randrange(40))]  # fmt: skip
    flat = flattened(whole + parts)
    assert flat[0].begin_ns == 0 and flat[-1].end_ns == 1000
    assert all(a.end_ns == b.begin_ns and a[:2] != b[:2] for a, b in pairwise(flat))
    for moment in rng.sample(range(1000), 50):
        (top,) = (span for span in flat if span.begin_ns <= moment < span.end_ns)
        there = [s for s in whole + parts if s.begin_ns <= moment < s.end_ns and s.kind != "hidden"]
        assert (top.kind, top.bucket) in {(span.kind, span.bucket) for span in there}
        assert top.kind != "step" or len(there) == 1


def test_texts_come_back_by_another_clock_and_nonsense_is_refused() -> None:
    found = observed(*a_step(1.0))
    back = [parse_span(text) for text in found.texts(offset_ns=-5)]
    assert [span._replace(begin_ns=span.begin_ns + 5, end_ns=span.end_ns + 5) for span in back] == list(found.spans())
    for text in ("", "wait 0 1", "nap 0 1 2", "wait 0 1 -2", "wait x 1 2", "wait -2 1 2", f"wait 0 1 {1 << 62}"):
        with pytest.raises(ValueError, match="expected a"):
            parse_span(text)
