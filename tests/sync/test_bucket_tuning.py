"""The tuner of bucket sizes: candidates from the model, turns, rounds, and what it ends with; no ranks involved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.comm.costs.forecast import Candidate
from clcomm.comm.costs.model import Cost
from clcomm.sync.auto_buckets import TURN_STEPS, WARM_UP_STEPS, BucketTuner, candidates, elapsed

#: A latency that is worth 100 kB.
COST = Cost(1e-4, 1e-9)


def layout_of(*nbytes: int) -> FlatLayout:
    return FlatLayout(ParameterSpec(str(n), (size // 4,)) for n, size in enumerate(nbytes))


def tried(*sizes: int) -> list[Candidate]:
    return [Candidate(size, (size,), 1e-3) for size in sizes]


def run_to_the_end(tuner: BucketTuner, seconds_of) -> list[int | None]:
    """Feed the tuner `seconds_of(size, step)`, and return the sizes of the steps."""
    sizes = []
    while tuner.decision is None:
        sizes.append(tuner.size)
        assert len(sizes) < 1000
        if tuner.add(0.0, seconds_of(tuner.size, len(sizes))):
            tuner.decide(elapsed(tuner.times()[np.newaxis], [0]))
    return sizes


def test_candidates_make_different_buckets_and_start_with_the_best_predicted():
    layout = layout_of(*[40_000] * 30)
    found = candidates(layout, COST.seconds)
    assert len(found) <= 6
    assert found[0].buckets == (1_200_000,) and found[0].seconds == pytest.approx(COST.seconds(1_200_000))
    plans = {tuple(bucket.nbytes for bucket in layout.buckets(each.bucket_size)) for each in found}
    assert len(plans) == len(found) and plans == {each.buckets for each in found}
    assert all(each.seconds <= 3 * found[0].seconds for each in found)


def test_one_tensor_leaves_nothing_to_try():
    tuner = BucketTuner(candidates(layout_of(4096), COST.seconds))
    assert tuner.decision.at_step == 0 and len(tuner.decision.evidence) == 1
    assert BucketTuner(candidates(FlatLayout([]), COST.seconds)).decision


def test_turns_rounds_and_what_is_kept():
    tuner = BucketTuner(tried(1, 2, 3, 4))
    sizes = run_to_the_end(tuner, lambda size, step: {1: 1.25, 2: 3.0, 3: 1.0, 4: 1.2}[size])
    first = WARM_UP_STEPS + 4 * TURN_STEPS * 3
    assert sizes[:WARM_UP_STEPS] == [1] * WARM_UP_STEPS
    assert sizes[WARM_UP_STEPS:first] == [size for size in (1, 2, 3, 4) for _ in range(TURN_STEPS)] * 3
    assert sizes[first:] == [size for size in (1, 3) for _ in range(TURN_STEPS)] * 12
    assert tuner.size == 3
    decision = tuner.decision
    assert (decision.what, decision.chosen, decision.at_step) == ("bucket_size", "3 B", len(sizes))
    assert [(t.name, t.measured_s, t.steps) for t in decision.evidence] == [
        ("1 B", 1.25, 45), ("2 B", 3.0, 9), ("3 B", 1.0, 45), ("4 B", pytest.approx(1.2), 9),
    ]  # fmt: skip
    assert all(trial.predicted_s == 1e-3 for trial in decision.evidence)
    assert "3 B (1000.000 ms in 45 steps, predicted 1.000 ms)" in str(decision)
    assert ", faster in 12 of 12 turns than the cost model's choice, 1 B: 1 B (" in str(decision)
    assert decision.as_dict()["evidence"][2]["measured_s"] == 1.0


def test_what_is_far_behind_is_tried_no_longer():
    tuner = BucketTuner(tried(1, 2, 3, 4))
    sizes = run_to_the_end(tuner, lambda size, step: {1: 1.0, 2: 3.0, 3: 3.0, 4: 1.5}[size])
    assert len(sizes) == WARM_UP_STEPS + 4 * TURN_STEPS * 3 and tuner.size == 1
    assert tuner.decision.reason == "the cost model's choice: all others were far behind"


def test_the_cost_models_choice_is_compared_even_where_it_is_far_behind():
    tuner = BucketTuner(tried(1, 2, 3))
    run_to_the_end(tuner, lambda size, step: {1: 4.0, 2: 1.0, 3: 2.0}[size])
    assert tuner.size == 2 and [trial.steps for trial in tuner.decision.evidence] == [45, 45, 9]


def test_predictions_of_something_else_are_left_out():
    tuner = BucketTuner(tried(1, 2), "time of a step", predicts=False)
    run_to_the_end(tuner, lambda size, step: float(size))
    assert "within the noise: 1 B (1000.000 ms), 2 B (2000.000 ms)" in str(tuner.decision)


def test_what_all_ranks_agree_on_decides_and_not_the_own_times():
    tuner = BucketTuner(tried(1, 2))
    while not tuner.add(0.0, 1.0 if tuner.size == 1 else 2.0):
        pass
    times = tuner.times()
    assert times.shape == (12, 2, TURN_STEPS, 2) and (times[..., 1] == np.array([[1.0], [2.0]])).all()
    tuner.decide(elapsed(times[np.newaxis, :, ::-1], [0]))
    assert tuner.size == 2


def test_a_step_takes_from_the_last_begin_to_the_last_end_on_a_host_and_the_mean_over_hosts():
    clocks = [0.0, 0.0, 1e6]  # hosts have a clock each
    times = np.array([[[1.0, 9.0]], [[4.0, 7.0]], [[2.0, 6.0]]]) + np.array(clocks).reshape(3, 1, 1)
    assert elapsed(times[:2], [0, 0]).tolist() == [9.0 - 4.0]
    assert elapsed(times, [0, 0, 1]).tolist() == [(5.0 + 4.0) / 2]


def test_single_slow_steps_do_not_mislead():
    tuner = BucketTuner(tried(1, 2, 3))
    run_to_the_end(tuner, lambda size, step: size * 1e-3 + (0.1 if step % 7 == 0 else 0.0))
    assert tuner.size == 1


@given(
    best=st.integers(0, 5),
    spread=st.floats(1.1, 4.0),
    noise=st.floats(0.0, 0.3),
    seed=st.integers(0, 1000),
)
def test_ends_within_the_noise_of_the_best_or_stays(best, spread, noise, seed):
    rng = np.random.default_rng(seed)
    true = {size: spread ** abs(size - best) for size in range(6)}
    tuner = BucketTuner([Candidate(size, (size,), 1.0) for size in range(6)])
    run_to_the_end(tuner, lambda size, step: true[size] * (1 + noise * rng.exponential()))
    assert true[tuner.size] <= 1.1 * (1 + noise) or (tuner.size == 0 and "within the noise" in tuner.decision.reason)


def test_a_candidate_per_tensor_has_a_name():
    tuner = BucketTuner([Candidate(None, (1, 2), 1.0)])
    assert tuner.decision.chosen == "per tensor"
    assert str(tuner.decision).endswith("per tensor (predicted 1000.000 ms)")
