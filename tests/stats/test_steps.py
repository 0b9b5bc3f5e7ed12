"""Steps by their phases: their sums, what the first ones leave, and means of windows whose number stays bounded."""

from __future__ import annotations

import pytest

from clcomm.comm.stats.events import Phase
from clcomm.comm.stats.steps import WARM_UP_STEPS, Steps


def take(steps: Steps, numbers: range) -> None:
    for step in numbers:
        seconds = 9.0 if step <= WARM_UP_STEPS else 0.001 * (1 + step % 2)
        steps.add(Phase("data", 0.0, 0.25), dict)
        steps.add(Phase("step", 0.0, seconds, communication_s=0.0004), lambda: {"steps so far": steps.count})


def test_the_first_steps_do_not_count_and_windows_are_whole() -> None:
    steps = Steps()
    take(steps, range(1, WARM_UP_STEPS + 4))
    assert steps.windows() == {"step_ms": [], "communication_ms": []}
    take(steps, range(WARM_UP_STEPS + 4, WARM_UP_STEPS + 4 * 7))
    found = steps.windows()
    assert found["step_ms"] == pytest.approx([1.5] * 6) and found["communication_ms"] == pytest.approx([0.4] * 6)


def test_what_the_first_steps_leave_is_that_of_the_first_and_then_of_ten() -> None:
    steps = Steps()
    assert steps.cold is None
    for taken in (1, 2, WARM_UP_STEPS, WARM_UP_STEPS + 5):
        take(steps, range(steps.count + 1, taken + 1))
        first = 1 if taken < WARM_UP_STEPS else WARM_UP_STEPS
        sums = {"steps": first, "training_s": pytest.approx(9.0 * first), "data_wait_s": pytest.approx(0.25 * first)}
        assert steps.cold == {**sums, "stats": {"steps so far": first}}
    assert steps.sums()["training_s"] == pytest.approx(90 + 0.001 * (2 + 1 + 2 + 1 + 2))


@pytest.mark.parametrize("count", [200, 255, 256, 257, 5000, 100_000])
def test_memory_is_bounded_and_nothing_is_lost(count: int) -> None:
    steps = Steps()
    for _ in range(WARM_UP_STEPS + count):
        steps.add(Phase("step", 0.0, 0.002), dict)
    windows, size = len(steps._windows), steps._size
    assert 32 <= windows < 64 and count - size < windows * size <= count
    assert steps.windows()["step_ms"] == pytest.approx([2.0] * windows)


def test_without_phases_a_step_goes_from_one_averaging_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, *(105.0 + 0.02 * step for step in range(WARM_UP_STEPS + 24))])
    monkeypatch.setattr("clcomm.comm.stats.steps.perf_counter", lambda: next(clock))
    steps = Steps()
    for step in range(WARM_UP_STEPS + 24):
        steps.averaged(3.0 + 0.005 * step, dict)
    assert steps.count == WARM_UP_STEPS + 24 and steps.cold == {**steps.cold, "training_s": pytest.approx(5.18)}
    found = steps.windows()
    assert found["step_ms"] == pytest.approx([20.0] * 6) and found["communication_ms"] == pytest.approx([5.0] * 6)


def test_phases_count_where_there_are_any() -> None:
    steps = Steps()
    for _ in range(3):
        steps.averaged(0.0, dict)
        steps.add(Phase("step", 0.0, 0.5), dict)
    assert steps.sums() == {"steps": 3, "training_s": 1.5, "data_wait_s": 0.0} and steps.cold["training_s"] == 0.5
