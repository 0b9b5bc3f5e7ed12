"""Schedules: PyTorch's values where the names are PyTorch's, and text that says what it means."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from training.schedules import (
    constant,
    cosine,
    exponential,
    linear,
    multi_step,
    parse_schedule,
    step_decay,
    warm_up,
)

STEPS = 60


def pytorch_factors(make):
    """Factors of a PyTorch scheduler over STEPS steps at a base rate of 1."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(torch.optim.lr_scheduler, optimizer)
    factors = []
    for _ in range(STEPS):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (constant(), lambda lr, o: lr.ConstantLR(o, factor=1.0)),
        (step_decay(7, 0.5), lambda lr, o: lr.StepLR(o, 7, 0.5)),
        (multi_step([30, 4, 10], 0.3), lambda lr, o: lr.MultiStepLR(o, [4, 10, 30], 0.3)),
        (exponential(0.9), lambda lr, o: lr.ExponentialLR(o, 0.9)),
        (linear(20, 0.25, 0.75), lambda lr, o: lr.LinearLR(o, 0.25, 0.75, 20)),
        (cosine(STEPS, 0.1), lambda lr, o: lr.CosineAnnealingLR(o, STEPS, 0.1)),
        (
            warm_up(12, constant(), start=0.25),
            lambda lr, o: lr.LinearLR(o, start_factor=0.25, total_iters=12),
        ),
        (
            warm_up(10, cosine(50), start=0.1),
            lambda lr, o: lr.SequentialLR(
                o, [lr.LinearLR(o, start_factor=0.1, total_iters=10), lr.CosineAnnealingLR(o, 50)], milestones=[10]
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_pytorchs_values(schedule, make):
    assert [schedule(step) for step in range(STEPS)] == pytest.approx(pytorch_factors(make), rel=1e-9, abs=1e-12)


def test_the_end_is_held():
    assert cosine(10, 0.2)(10) == cosine(10, 0.2)(500) == pytest.approx(0.2)
    assert linear(10, 1, 0.5)(10_000) == 0.5


@given(st.integers(1, 50), st.integers(0, 200))
def test_warm_up_rises_to_the_schedules_start_and_hands_over(steps, step):
    schedule = warm_up(steps, cosine(100))
    assert schedule(0) == pytest.approx(1 / steps)
    assert schedule(steps) == 1
    assert schedule(steps + step) == cosine(100)(step)
    assert all(schedule(i) < schedule(i + 1) for i in range(steps if steps > 1 else 0))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("constant", constant()),
        ("cosine", cosine(1000)),
        ("cosine:floor=0.01,warmup=100", warm_up(100, cosine(900, 0.01))),
        ("linear:end=0.1", linear(1000, end=0.1)),
        ("step:size=50", step_decay(50)),
        ("step:size=50,gamma=0.5", step_decay(50, 0.5)),
        ("multistep:at=30+60,gamma=0.2,warmup=5", warm_up(5, multi_step([30, 60], 0.2))),
        ("exponential:gamma=0.99", exponential(0.99)),
        ("constant:warmup=10", warm_up(10, constant())),
    ],
)
def test_text(text, want):
    got = parse_schedule(text, 1000)
    for step in (0, 1, 5, 29, 30, 64, 100, 500, 999, 1000, 2000):
        assert got(step) == want(step)


@pytest.mark.parametrize(("text", "total"), [("cosine:warmup=10,floor=0.1", 60), ("linear:end=0.1", 60)])
def test_an_end_of_its_own(text, total):
    ends, follows = parse_schedule(f"{text},steps={total}", 1000), parse_schedule(text, total)
    assert [ends(step) for step in range(100)] == [follows(step) for step in range(100)]


def test_a_warm_up_longer_than_the_run_is_only_a_warm_up():
    schedule = parse_schedule("cosine:warmup=100", 50)
    assert schedule(0) == pytest.approx(0.01) and schedule(49) == pytest.approx(0.01 + 0.99 * 0.49)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cosin", "expected one of constant, step, multistep, exponential, linear, cosine, got 'cosin'"),
        ("", "expected one of"),
        ("cosine:flor=1", "takes the options warmup, steps, floor, got 'flor'"),
        ("cosine:floor", "name=value"),
        ("cosine:floor=", "name=value"),
        ("cosine:floor=low", "expected a number from 0 up, got 'low'"),
        ("cosine:floor=nan", "expected a number"),
        ("cosine:warmup=1.5", "expected a whole number from 0 up, got '1.5'"),
        ("cosine:warmup=-1", "from 0 up"),
        ("step", "step needs size="),
        ("step:size=0", "at least 1 steps, got 0"),
        ("multistep:at=3+x", "whole number from 0 up, got 'x'"),
        ("exponential", "exponential needs gamma="),
    ],
)
def test_text_that_says_nothing_is_refused(text, said):
    with pytest.raises(ArgumentError) as caught:
        parse_schedule(text, 100)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_factors_are_finite_for_any_step():
    for schedule in (cosine(7), linear(7), step_decay(7), exponential(0.5), multi_step([3])):
        assert all(math.isfinite(schedule(step)) for step in (0, 1, 10**6))
