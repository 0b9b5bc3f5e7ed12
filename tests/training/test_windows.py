"""Windows of steps: what counts, what they come to, and that their number stays bounded."""

from __future__ import annotations

import pytest

from training.metrics import WARM_UP_STEPS, StepRecord
from training.windows import StepWindows


def take(windows: StepWindows, steps: range) -> None:
    for step in steps:
        seconds = 9.0 if step <= WARM_UP_STEPS else 0.001 * (1 + step % 2)
        windows.step_finished(StepRecord(step, 0, step, 32, 1.0, 0.1, seconds, 0.0, 0.0004))


def test_the_first_steps_do_not_count_and_windows_are_whole() -> None:
    windows = StepWindows()
    take(windows, range(1, WARM_UP_STEPS + 4))
    assert windows.estimates() is None
    take(windows, range(WARM_UP_STEPS + 4, WARM_UP_STEPS + 4 * 7))
    found = windows.estimates()
    assert found is not None
    assert tuple(found["step_ms"]) == pytest.approx((1.5, 1.5, 1.5))
    assert tuple(found["communication_ms"]) == pytest.approx((0.4, 0.4, 0.4))


@pytest.mark.parametrize("steps", [200, 255, 256, 257, 5000, 100_000])
def test_memory_is_bounded_and_nothing_is_lost(steps: int) -> None:
    windows = StepWindows()
    for step in range(1, WARM_UP_STEPS + steps + 1):
        windows.step_finished(StepRecord(step, 0, step, 32, 1.0, 0.1, 0.002, 0.0))
    count, size = len(windows._windows), windows._size
    assert 32 <= count < 64 and steps - size < count * size <= steps
    found = windows.estimates()
    assert found is not None and found["step_ms"].median == pytest.approx(2.0)
