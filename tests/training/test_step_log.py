"""Steps on their way to metrics and callbacks: each once, in order, at once where one wants that, and never late."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.metrics import WARM_UP_STEPS, Metrics, StepRecord
from training.step_log import LONGEST_S, MOST_STEPS, StepLog
from training.trainer import Callback


class Follows(Callback):
    def __init__(self, every_step: bool):
        self.every_step = every_step
        self.records: list[StepRecord] = []

    def step_finished(self, record: StepRecord) -> None:
        self.records.append(record)


def step(number: int, seconds: float = 0.25, cpu_s: float | None = None) -> StepRecord:
    return StepRecord(number, 0, number, 32, 1.0 / number, 0.1, seconds, 0.0, 0.0, cpu_s)


@given(st.lists(st.floats(0, 2 * LONGEST_S), max_size=200), st.lists(st.booleans(), max_size=3))
def test_every_step_comes_once_and_in_time(pauses: list[float], wanted: list[bool]) -> None:
    now_s, callbacks = 0.0, [Follows(every_step) for every_step in wanted]
    log, added, since_s = StepLog(callbacks, lambda: now_s), [], 0.0
    for number, pause_s in enumerate(pauses, 1):
        now_s += pause_s
        added.append(step(number))
        before = log.metrics.steps
        log.add(added[-1])
        kept = len(added) - log.metrics.steps
        assert kept < (1 if any(wanted) else MOST_STEPS) and (not kept or now_s < since_s + LONGEST_S)
        since_s = now_s if log.metrics.steps > before else since_s
        assert all(each.records == added[: log.metrics.steps] for each in callbacks)
    log.hand_on()
    assert log.metrics.steps == len(pauses) and all(each.records == added for each in callbacks)


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize("steps", [1, WARM_UP_STEPS, WARM_UP_STEPS + 1, 200])
def test_processor_time_of_some_steps_stands_for_all(steps: int, every: int) -> None:
    """The first steps have their own; later ones take a share of their time that is measured in some."""
    metrics, durations = Metrics(), itertools.cycle((0.25, 0.5))
    expected = 0.0
    for number, seconds in zip(range(1, steps + 1), durations, strict=False):
        is_warm = number > WARM_UP_STEPS
        cpu_s = seconds * (0.75 if is_warm else 2.0)
        is_measured = not is_warm or (number - WARM_UP_STEPS - 1) % every == 0
        metrics.add(step(number, seconds, cpu_s if is_measured else None))
        expected += cpu_s
    assert metrics.cpu_s == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "seconds"), [(1, 2.0), (2, 0.5), (10, 0.5), (11, 0.25), (20, 0.25)])
def test_speed_leaves_out_the_steps_that_build_kernels(steps: int, seconds: float) -> None:
    """The first step takes 2 s, the next nine 0.5 s, all others 0.25 s."""
    metrics = Metrics()
    for number in range(steps):
        took = 2.0 if number == 0 else 0.5 if number < WARM_UP_STEPS else 0.25
        metrics.add(StepRecord(number + 1, 0, number + 1, 64, 1.0, 0.1, took, 0.0))
    assert metrics.samples_per_s() == 64 / seconds
