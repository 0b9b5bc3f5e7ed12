"""Events: the rank that arrived last, and the time of a phase."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.stats import events
from clcomm.stats.events import Phase, TimedPhase, last_of


@pytest.mark.parametrize("seed", range(50))
def test_the_last_rank_and_how_late_it_was(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = [int(each) for each in rng.integers(0, 1_000 if seed % 2 else 5, rng.integers(2, 9))]
    last, late_s = last_of(arrivals)
    assert all(each <= arrivals[last] for each in arrivals)
    assert late_s == pytest.approx(min(arrivals[last] - each for i, each in enumerate(arrivals) if i != last) * 1e-9)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("communicated_s", "shown_s"), [((0.0, 0.0), 0.0), ((1.0, 1.25), 0.25), ((1.0, 9.0), 2.0)])
def test_a_phase_is_timed_and_communicates_no_longer_than_it_lasts(
    monkeypatch, raises, communicated_s, shown_s
) -> None:
    clock, communicated = iter((10.0, 12.0)), iter(communicated_s)
    monkeypatch.setattr(events.time, "perf_counter", lambda: next(clock))
    found: list[Phase] = []
    block = TimedPhase(found.append, lambda: next(communicated), "step", "label", 2, (("loss", 0.5),))
    try:
        with block:
            if raises:
                raise KeyError("in the block")
    except KeyError:
        assert raises
    assert found == [Phase("step", 10.0, 2.0, "label", 2, shown_s, (("loss", 0.5),))]
