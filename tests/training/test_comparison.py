"""Which ways are compared, how they take turns, and what the windows come to."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.comm.costs.model import Cost, Fit
from training.comparison.options import ComparisonOptions
from training.comparison.outcome import Outcome
from training.comparison.plot import _PER_TENSOR_AT, _place, curves
from training.comparison.tables import alone, calls_table, times_table
from training.comparison.turns import take_turns
from training.comparison.variants import Variant, variants_of


def named(*texts: str, bucket_size: str = "1MiB", transport: str = "auto", overlap: str = "auto") -> list[Variant]:
    return variants_of(ComparisonOptions(variants=texts, bucket_size=bucket_size, transport=transport, overlap=overlap))


def test_bucketed_and_per_tensor_come_first_and_each_way_once() -> None:
    assert [(v.name, v.bucket_size, v.transport) for v in named("64KiB", "1024KiB", "tensor+mpi", "bucketed+auto")] == [
        ("bucketed", 1 << 20, "auto"),
        ("per tensor", None, "auto"),
        ("64KiB", 1 << 16, "auto"),
        ("per tensor, mpi", None, "mpi"),
    ]
    assert [v.name for v in named("tensor+mpi", transport="mpi")] == ["bucketed", "per tensor"]
    assert named("auto", "auto+mpi+overlap", "64KiB+overlap")[2:] == [
        Variant("auto", "auto", "auto"), Variant("auto, mpi, overlap", "auto", "mpi", True),
        Variant("64KiB, overlap", 1 << 16, "auto", True),
    ]  # fmt: skip
    assert [v.bucket_size for v in named("1MiB", bucket_size="auto")] == ["auto", None, 1 << 20]


@pytest.mark.parametrize("text", ["", "fast", "64KiB+fast", "64KiB+mpi+shared", "+mpi", "0", "auto+overlap+overlap"])
def test_a_way_that_is_none(text: str) -> None:
    with pytest.raises(
        ArgumentError,
        match=f"--variants: expected bucketed, tensor, auto or a size .* got '{text}'".replace("+", r"\+"),
    ):
        named(text)


def test_join_rules_overlap_out() -> None:
    assert not any(variant.overlap for variant in variants_of(ComparisonOptions(uneven_inputs="join")))
    assert any(variant.overlap for variant in variants_of(ComparisonOptions(uneven_inputs="pad")))
    with pytest.raises(ArgumentError, match="--variants: expected no overlap with --uneven-inputs join, got '1KiB, ov"):
        variants_of(ComparisonOptions(uneven_inputs="join", variants=["1KiB+overlap"]))


def test_a_way_sets_the_options_of_its_run() -> None:
    options = ComparisonOptions(variants=["64KiB+mpi+overlap"], lr=0.1)
    bucketed, tensor, other = (v.applied_to(options) for v in variants_of(options))
    assert (bucketed.no_bucketing, bucketed.bucket_size, bucketed.transport) == (False, 1 << 20, "auto")
    assert tensor.no_bucketing is True
    assert (bucketed.overlap, tensor.overlap, other.overlap) == ("off", "off", "on")
    assert all(variant.overlap for variant in named("64KiB+mpi", overlap="on"))
    assert (other.no_bucketing, other.bucket_size, other.transport, other.lr) == (False, 1 << 16, "mpi", 0.1)


@pytest.mark.parametrize(
    ("asked", "own"),
    [
        ("run.json.gz", "run.per-tensor+mpi.json.gz"), ("a/run.v2.json", "a/run.v2.per-tensor+mpi.json"),
        ("run", "run.per-tensor+mpi"), ("run.gz", "run.per-tensor+mpi.gz"),
    ],
)  # fmt: skip
def test_each_way_has_a_trace_of_its_own(asked: str, own: str) -> None:
    options = ComparisonOptions(variants=["tensor+mpi"], trace=asked)
    assert variants_of(options)[2].applied_to(options).trace == own
    assert named("64KiB")[2].applied_to(ComparisonOptions()).trace is None


@pytest.mark.parametrize("total", [1, 2, 3, 4, 7, 24, 235, 1000])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_everyone_takes_all_steps_in_the_same_windows(total: int, count: int) -> None:
    turns: list[tuple[int, int, bool]] = []
    runs = [lambda steps, counts, who=who: turns.append((who, steps, counts)) for who in range(count)]
    take_turns(runs, total, seed=3)
    windows = [[(steps, counts) for its, steps, counts in turns if its == who] for who in range(count)]
    assert all(its == windows[0] for its in windows)
    assert sum(steps for steps, _ in windows[0]) == total
    assert any(counts for _, counts in windows[0])
    rounds = [turns[start : start + count] for start in range(0, len(turns), count)]
    assert all(sorted(who for who, _, _ in its_round) == list(range(count)) for its_round in rounds)
    again: list[tuple[int, int, bool]] = []
    take_turns([lambda steps, counts, who=who: again.append((who, steps, counts)) for who in range(count)], total, 3)
    assert again == turns  # every rank draws the same order


def test_the_first_steps_warm_up_and_orders_vary() -> None:
    turns: list[tuple[str, int, bool]] = []
    take_turns([lambda *turn: turns.append(("a", *turn)), lambda *turn: turns.append(("b", *turn))], 235, seed=0)
    assert {turn[1:] for turn in turns[:2]} == {(10, False)}
    assert all(turn[2] for turn in turns[2:])
    first = [turns[index][0] for index in range(0, len(turns), 2)]
    assert {"a", "b"} == set(first) and first != sorted(first)


def outcome(name: str, buckets: tuple[int, ...], step_s: list[float], size: int | None = None) -> Outcome:
    times = np.array(step_s)
    return Outcome(
        Variant(name, size, "auto"),
        buckets,
        "shared",
        SimpleNamespace(),
        None,
        times,
        times / 4,
        np.where(np.isfinite(times), 64.0, np.nan),
        times / 8,
    )


def test_ratios_are_taken_round_by_round() -> None:
    slow_rounds = [1.0, 5.0, 1.0, 9.0, 1.0, 3.0, 1.0]
    reference = outcome("per tensor", (8, 8), [2 * slow for slow in slow_rounds])
    timing = outcome("bucketed", (16,), slow_rounds).timing(reference)
    assert tuple(timing.ratio) == (0.5, 0.5, 0.5)
    assert timing.step_s.median == 1.0 and timing.step_s.high == 9.0
    assert timing.communication_share == 0.25
    assert timing.images_per_s.median == 64


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=30))
def test_images_a_second_change_as_steps_a_second_do(step_s: list[float]) -> None:
    """Both come from the same windows, whatever their number: one cannot be slower and the other as fast."""
    found = outcome("auto", (16,), [*step_s, float("nan")], "auto").timing(
        outcome("per tensor", (8, 8), [1.0] * (len(step_s) + 1))
    )
    rate = found.step_s.rate_of(64)
    assert found.images_per_s == rate and rate.median == pytest.approx(64 / found.step_s.median)
    assert rate.low is None or rate.low <= rate.median <= rate.high


@pytest.mark.parametrize("chosen", [8 << 10, 1 << 20, None])
def test_auto_has_its_place_at_the_size_it_chose(chosen: int | None) -> None:
    """Its largest bucket is as large as the largest tensor, whatever the size."""
    found = replace(outcome("auto", (5672, 802816), [1.0], "auto"), result=SimpleNamespace(bucket_size=chosen))
    assert found.bucket_size == chosen and _place(found) == (chosen or _PER_TENSOR_AT)
    assert [_place(outcome("1KiB", (5672,), [1.0], size)) for size in (1024, None)] == [1024, _PER_TENSOR_AT]


@pytest.mark.parametrize("width", [60, 80, 120, 140])
def test_the_table_of_times_fits(width: int) -> None:
    from rich.console import Console

    outcomes = [outcome("bucketed", (16,), [0.01] * 7), outcome("per tensor, mpi", (8, 8), [0.02] * 7)]
    outcomes += [outcome("per tensor", (8, 8), [0.02] * 7), outcome("auto", (8, 8), [float("nan")] * 7)]
    console = Console(width=width, file=io.StringIO())
    console.print(times_table(outcomes))
    shown = console.file.getvalue()
    assert "…" not in shown and "per tensor, mpi" in shown
    assert "0.50 (0.50-0.50)" in shown and max(map(len, shown.splitlines())) <= width
    assert "10.00 (10.00-10.00)" in shown
    for heading, least in (("comm ms", 80), ("alone ms", 80), ("images/s", 120), ("via", 120), ("share", 120)):
        assert len(re.findall(rf"{heading}\b", shown)) == 1  # as a heading, or as what there is no room for
        assert bool(re.search(rf"^ .*{heading}\b", shown, re.MULTILINE)) == (width >= least)
    assert "nan" not in shown and re.search(r"auto +(2 +)?(shared +)?- +-", shown)  # it was never settled
    assert "too few windows" not in shown


def test_communication_alone_is_compared_round_by_round() -> None:
    slow_rounds = [1.0, 5.0, 1.0, 9.0, 1.0, 3.0, 1.0]
    bucketed, tensor = outcome("bucketed", (16,), slow_rounds), outcome("per tensor", (8, 8), slow_rounds)
    assert alone([bucketed, replace(tensor, alone_s=3 * bucketed.alone_s)]) == (
        "alone, a step's reductions with nothing between them: per tensor takes 3.0 (3.0-3.0) times as long as bucketed"
    )
    assert alone([replace(each, alone_s=np.full(1, np.nan)) for each in (bucketed, tensor)]) == ""


@pytest.mark.parametrize("width", [60, 80])
def test_lizardists_table_fits_with_figures_of_a_long_run(width: int) -> None:
    from rich.console import Console

    totals = {"average_bytes_per_call": 52_900_000.0, "calls": 12_345_678, "bytes": 653_086_413_810_000}
    outcomes = [outcome("bucketed", (16,), [0.01]), outcome("per tensor", (8, 8), [0.02])]
    for each in outcomes:
        each.__dict__["result"] = SimpleNamespace(stats=SimpleNamespace(total=lambda *names: totals))
    console = Console(width=width, file=io.StringIO())
    console.print(calls_table(*outcomes))
    shown = console.file.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    assert shown.count("653,086,413,810,000") == 2 and shown.count("1x") == 3


def test_the_curve_is_what_the_cost_model_says_above_the_rest_of_a_step() -> None:
    tensors = (40, 5120, 512, 802_816)  # the order of backward
    alpha, beta, rest = 1e-4, 1e-9, 5e-3
    cost = Fit(Cost(alpha, beta), 0.0, 0.0, ())
    whole = sum(tensors)
    outcomes = [
        outcome("bucketed", (whole,), [rest + alpha + beta * whole] * 6, 1 << 20),
        outcome("per tensor", tensors, [rest + 4 * alpha + beta * whole] * 6),
    ]
    for outcome_ in outcomes:
        outcome_.session.comm = SimpleNamespace(size=2)
    points = dict(curves(outcomes, {"auto": cost})["auto"])
    assert points[max(size for size in points if size is not None)] == pytest.approx(rest + alpha + beta * whole)
    assert max(points.values()) == pytest.approx(rest + 4 * alpha + beta * whole)
    assert curves(outcomes, {}) == {}
