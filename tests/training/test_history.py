"""A run's points by step: means of neighbouring steps, as many as fit."""

from __future__ import annotations

import numpy as np
import pytest

from training.history import StepHistory
from training.metrics import StepRecord


@pytest.mark.parametrize("steps", [1, 2, 255, 256, 257, 1000, 3001])
def test_points_are_means_of_steps_that_follow_one_another(steps: int) -> None:
    losses = np.random.default_rng(steps).normal(size=steps)
    history = StepHistory()
    for number, loss in enumerate(losses):
        history.step_finished(StepRecord(7 + number, 0, 0, 32, float(loss), 0.1, 1e-3 * (number + 1), 0.0))
    found = history.as_dict()
    assert found is not None and found["first_step"] == 7
    width = found["steps_a_point"]
    assert width == max(1, 2 ** int(np.floor(np.log2(steps / 128)))) if steps >= 256 else width == 1
    whole = steps // width
    assert len(found["loss"]) == len(found["step_ms"]) == len(found["communication_ms"]) == whole < 256
    assert found["loss"] == pytest.approx(losses[: whole * width].reshape(whole, width).mean(1))
    assert found["step_ms"] == pytest.approx(np.arange(1, whole * width + 1).reshape(whole, width).mean(1))


def test_without_a_step_there_is_nothing() -> None:
    assert StepHistory().as_dict() is None
