"""Events: the time of a phase."""

from __future__ import annotations

import pytest

from clcomm.comm.stats import events
from clcomm.comm.stats.events import Phase, TimedPhase


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
