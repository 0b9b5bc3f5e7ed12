"""Times of all-reduces in the background, against a timeline in which each tick is attributed on its own.

Times are multiples of 2**-10 s, so that sums are exact; calls are at least a tick apart, so that none are merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from clcomm.comm.collectives.in_flight import InFlightTimes
from clcomm.comm.stats.events import Call, Collective

TICK_S = 2.0**-10


@dataclass
class FakePending:
    """A transport's operation, as far as its times go."""

    finished: bool = False
    finished_s: float = 0.0
    failed: bool = False
    waits: list[tuple[float, float]] | None = None
    arrivals: list[int] | None = None


@dataclass
class Timeline:
    """A drawn run, in ticks: when operations started and finished, and in which ticks the caller was exposed."""

    starts: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)
    waits: list[set[int] | None] = field(default_factory=list)
    exposed: set[int] = field(default_factory=set)
    events: list[Collective] = field(default_factory=list)
    exposed_s: float = 0.0


def drawn(seed: int) -> Timeline:
    """Play random starts, waits and polls, some hidden, and completions outside any call; all complete in the end."""
    rng = np.random.default_rng(seed)
    times, run, now = InFlightTimes(), Timeline(), 0
    operations: list[FakePending] = []
    total = int(rng.integers(1, 8))
    while len(run.finishes) < total:
        now += int(rng.integers(1, 6))  # the caller computes
        started, finished = len(operations), len(run.finishes)
        if finished < started and rng.random() < 0.2:  # another Communicator's wait completes the oldest
            finish(operations, run, now)
            now += int(rng.integers(0, 3))
        begin, now = now, now + int(rng.integers(1, 6))
        if started < total and rng.random() < 0.5:
            start(times, operations, run, begin, rng)
        for moment in sorted(rng.integers(begin, now + 1, 2)):
            if len(run.finishes) < len(operations) and rng.random() < 0.4:
                finish(operations, run, int(moment))
        is_hidden = bool(rng.random() < 0.3)
        if not is_hidden:
            run.exposed.update(range(begin, now))
        times.add_call(begin * TICK_S, now * TICK_S, is_hidden=is_hidden)
    run.exposed_s = times.exposed.seconds
    return run


def start(
    times: InFlightTimes, operations: list[FakePending], run: Timeline, begin: int, rng: np.random.Generator
) -> None:
    pending = FakePending(failed=bool(rng.random() < 0.2))
    ticks: set[int] | None = None
    if rng.random() < 0.8:
        spans = np.sort(rng.choice(np.arange(begin, begin + 40), 4, replace=False)).reshape(2, 2).tolist()
        pending.waits = [(first * TICK_S, last * TICK_S) for first, last in spans]
        ticks = {tick for first, last in spans for tick in range(first, last)}
    if rng.random() < 0.5:
        pending.arrivals = [int(each) for each in rng.permutation(3)]
    operations.append(pending)
    run.starts.append(begin)
    run.waits.append(ticks)
    call = Call("all_reduce", "drawn", "shared", 4 * len(operations), bucket=len(operations))
    times.add(call, len(operations), begin * TICK_S, pending, run.events.append)


def finish(operations: list[FakePending], run: Timeline, moment: int) -> None:
    """Complete the oldest operation that is not complete, at or after its start and the one before it."""
    oldest = operations[len(run.finishes)]
    moment = max([moment, run.starts[len(run.finishes)], *run.finishes])
    oldest.finished, oldest.finished_s = True, moment * TICK_S
    run.finishes.append(moment)


@pytest.mark.parametrize("seed", range(300))
def test_each_tick_counts_for_the_operation_in_turn(seed: int) -> None:
    run = drawn(seed)
    assert [event.bucket for event in run.events] == [*range(1, len(run.starts) + 1)]
    previous = 0
    for event, started, finished, waits in zip(run.events, run.starts, run.finishes, run.waits, strict=True):
        turn = max(started, previous)
        ticks = set(range(turn, finished))
        assert event.began_s == turn * TICK_S and event.seconds == (finished - turn) * TICK_S
        assert event.queued_s == (turn - started) * TICK_S
        assert event.exposed_s == len(ticks & run.exposed) * TICK_S
        assert ticks_of(event.exposed) == ticks & run.exposed
        expected = None if waits is None else len(ticks & run.exposed & waits) * TICK_S
        assert event.wait_s == expected and ticks_of(event.waits) == ticks & run.exposed & (waits or set())
        previous = finished
    assert run.exposed_s == len(run.exposed) * TICK_S


def ticks_of(spans: tuple[tuple[float, float], ...]) -> set[int]:
    return {tick for begin, end in spans for tick in range(round(begin / TICK_S), round(end / TICK_S))}


def test_the_drawn_runs_hold_what_they_are_to_test() -> None:
    """A family without queues, hidden calls and unexposed finishes would show little."""
    runs = [drawn(seed) for seed in range(300)]
    events = [event for run in runs for event in run.events]
    assert sum(event.queued_s > 0 for event in events) > 100
    assert sum(event.exposed_s < event.seconds for event in events) > 100
    assert sum(bool(event.wait_s) for event in events) > 100 and any(event.wait_s is None for event in events)
    assert any(event.failed for event in events)


@pytest.mark.parametrize("arrivals", [[5, 900, 30], [900, 5], [0, 0, 0]])
def test_the_last_rank_comes_from_the_arrivals(arrivals: list[int]) -> None:
    times, events = InFlightTimes(), []
    pending = FakePending(finished=True, finished_s=1.0, arrivals=arrivals)
    times.add(Call("all_reduce", "", "shared"), 1, 0.0, pending, events.append)
    times.report_finished()
    ordered = sorted(arrivals)
    assert arrivals[events[0].last_rank] == ordered[-1]
    assert events[0].late_s == pytest.approx((ordered[-1] - ordered[-2]) * 1e-9)
