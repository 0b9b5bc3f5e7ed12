"""What a report's timeline is made of: the events of the last steps, flattened so that each moment counts once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from clcomm.report.last_steps import KINDS, MOST_EVENTS, STEPS, LastSteps, Span, flattened, parse_span
from clcomm.stats.events import Collective, Phase


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
