"""The tuner of bucket sizes: candidates from the model, turns, rounds, and what it ends with; no ranks involved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.bucket_tuning import WARM_UP_STEPS, BucketTuner, candidates
from clcomm.costmodel import Cost
from clcomm.forecast import Candidate
from clcomm.layout import FlatLayout, ParameterSpec

#: A latency that is worth 100 kB.
COST = Cost(1e-4, 1e-9)


def layout_of(*nbytes: int) -> FlatLayout:
    return FlatLayout(ParameterSpec(str(n), (size // 4,)) for n, size in enumerate(nbytes))


def tried(*sizes: int) -> list[Candidate]:
    return [Candidate(size, (size,), 1e-3) for size in sizes]


def run_to_the_end(tuner: BucketTuner, seconds_of) -> list[int | None]:
    """Feed the tuner `seconds_of(size, step)`, and return the sizes of the steps."""
    sizes = []
    while not tuner.done:
        sizes.append(tuner.size)
        assert len(sizes) < 1000
        if tuner.add(seconds_of(tuner.size, len(sizes))):
            tuner.decide(tuner.times())
    return sizes


def test_candidates_make_different_buckets_and_start_with_the_best_predicted():
    layout = layout_of(*[40_000] * 30)
    found = candidates(layout, COST.seconds)
    assert len(found) <= 6
    assert found[0].buckets == (1_200_000,) and found[0].seconds == pytest.approx(COST.seconds(1_200_000))
    plans = {tuple(bucket.nbytes for bucket in layout.buckets(each.bucket_size)) for each in found}
    assert len(plans) == len(found) and plans == {each.buckets for each in found}
    assert all(each.seconds <= 3 * found[0].seconds for each in found)


def test_with_overlap_the_best_predicted_is_no_single_bucket():
    layout = layout_of(*[400_000] * 16)
    found = candidates(layout, COST.seconds, backward_s=8e-3, overlap=True)
    assert len(found[0].buckets) > 1


def test_one_tensor_leaves_nothing_to_try():
    tuner = BucketTuner(candidates(layout_of(4096), COST.seconds))
    assert tuner.done and tuner.decision.at_step == 0 and len(tuner.decision.evidence) == 1
    assert BucketTuner(candidates(FlatLayout([]), COST.seconds)).done


def test_turns_rounds_and_what_is_kept():
    tuner = BucketTuner(tried(1, 2, 3, 4))
    sizes = run_to_the_end(tuner, lambda size, step: {1: 4.0, 2: 3.0, 3: 1.0, 4: 2.0}[size])
    first = WARM_UP_STEPS + 4 * 5
    assert sizes[:WARM_UP_STEPS] == [1] * WARM_UP_STEPS
    assert sizes[WARM_UP_STEPS:first] == [1, 2, 3, 4] * 5
    assert sizes[first:] == [3, 4] * 10
    assert tuner.size == 3
    decision = tuner.decision
    assert (decision.what, decision.chosen, decision.at_step) == ("bucket_size", "3 B", len(sizes))
    assert [(t.name, t.measured_s, t.steps) for t in decision.evidence] == [
        ("1 B", 4.0, 5), ("2 B", 3.0, 5), ("3 B", 1.0, 15), ("4 B", 2.0, 15),
    ]  # fmt: skip
    assert all(trial.predicted_s == 1e-3 for trial in decision.evidence)
    assert "3 B (1000.000 ms, predicted 1.000 ms)" in str(decision)
    assert decision.as_dict()["evidence"][2]["measured_s"] == 1.0


def test_the_ranks_agreement_decides_and_not_the_own_times():
    tuner = BucketTuner(tried(1, 2))
    while not tuner.add(1.0 if tuner.size == 1 else 2.0):
        pass
    assert tuner.times().tolist() == [[1.0] * 5, [2.0] * 5]
    tuner.decide(tuner.times()[::-1].copy())
    assert tuner.done and tuner.size == 2


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
def test_ends_within_the_noise_of_the_best(best, spread, noise, seed):
    rng = np.random.default_rng(seed)
    true = {size: spread ** abs(size - best) for size in range(6)}
    tuner = BucketTuner([Candidate(size, (size,), 1.0) for size in range(6)])
    run_to_the_end(tuner, lambda size, step: true[size] * (1 + noise * rng.exponential()))
    assert true[tuner.size] <= 1.1 * (1 + noise)


def test_a_candidate_per_tensor_has_a_name():
    tuner = BucketTuner([Candidate(None, (1, 2), 1.0)])
    assert tuner.done and tuner.decision.chosen == "per tensor"
    assert str(tuner.decision).endswith("per tensor (predicted 1000.000 ms)")
