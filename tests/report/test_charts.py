"""Charts: they hold what the tables say, and their axes have names and round ticks."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from itertools import pairwise

import pytest

from clcomm.base.units import format_size
from clcomm.insight.drawing.scene import count_text, log_ticks, size_ticks, time_text
from clcomm.insight.report.chart_kinds import CALLS, SIZE, TIME, Bars, Distribution, Points
from clcomm.insight.report.formats import as_html
from tests.report.conftest import table
from tests.report.runs import LAYOUT, STEPS


def test_charts_hold_what_the_tables_say(report):
    bars = {chart.title: chart for chart in report.charts if isinstance(chart, Bars)}
    chart, ranks = bars["Where a step goes, by rank"], table(report, "step_ranks")
    assert [column.heading for column in ranks.columns] == ["rank", *chart.parts, "a whole step"]
    for row, values in zip(ranks.rows, chart.values, strict=True):
        assert values == pytest.approx([1e3 * row[column.key] for column in ranks.columns[1:-1]])
    (times,) = (chart for chart in report.charts if isinstance(chart, Distribution))
    assert sum(times.counts) == 4 * 5 * STEPS and len(times.edges_s) == len(times.counts) + 1 <= 25
    (points,) = (chart for chart in report.charts if isinstance(chart, Points))
    assert [nbytes for nbytes, _ in points.points] == [sum(bucket) for bucket in LAYOUT]


def test_axes_have_names(report):
    page = as_html(report)
    assert [page.count(f">{name}</text>") for name in (TIME, SIZE, CALLS)] == [2, 1, 1]


@pytest.mark.parametrize(("low", "high"), [(1e-7, 1e2), (2e-5, 3e-4), (1e-3, 6e-3)])
def test_ticks_are_few_round_and_inside(low, high):
    ticks = log_ticks(low, high)
    assert len(ticks) <= 7 and all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
    assert all(re.fullmatch(r"[125]0{0,2} [mu]?s", time_text(tick)) or tick < 1e-6 for tick in ticks)
    assert log_ticks(5, 210, 5) == [10, 30, 100] and log_ticks(1, 100, 7) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(1e-3, 1e-3) == [1e-3]
    assert size_ticks(1000, 5000) == [1024.0, 2048.0, 4096.0] and len(size_ticks(1, 1 << 40)) <= 7


@pytest.mark.parametrize("most", [5, 7])
@pytest.mark.parametrize(("low", "high"), [(1.2e-4, 1.38e-4), (1.1e-3, 1.9e-3), (9e-5, 9.2e-5), (6e-4, 1.9e-3)])
def test_less_than_a_decade_has_ticks_too(low, high, most):
    ticks = log_ticks(low, high, most)
    assert 2 <= len(ticks) <= most and all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)
    assert len({time_text(tick) for tick in ticks}) == len(ticks)


def drawn_numbers(low: int, high: int) -> list[Fraction]:
    """Numbers from 10^low to 10^high and 0, in order: of any size, and beside all that round up to a power of ten."""
    rng = random.Random(low)
    drawn = [Fraction(10) ** rng.randrange(low, high) * rng.randrange(10**6, 10**7) / 10**6 for _ in range(2000)]
    near = [Fraction(10) ** power * (1 - Fraction(part, 10**5))
            for power in range(low + 4, high + 1) for part in (*range(-3, 4), 40, 49, 50, 51, 60)]  # fmt: skip
    return sorted({Fraction(0), *drawn, *near})


def assert_right(numbers: list[Fraction], texts: list[str], units: dict[str, Fraction], most_error: Fraction) -> None:
    """Texts have no exponent, are as large as their numbers but for the third digit, and never fall."""
    found = []
    for number, text in zip(numbers, texts, strict=True):
        match = re.fullmatch(r"([0-9]{1,3}(?:,[0-9]{3})*|[0-9]+\.[0-9]+)( ?[A-Za-z]*)", text)
        assert match, text
        found.append(Fraction(match[1].replace(",", "")) * units[match[2]])
        assert abs(found[-1] - number) <= number * Fraction(51, 10**4) + most_error, (float(number), text)
        assert match[2] == list(units)[-1] or found[-1] < 1000 * units[match[2]] or found[-1] < 10**4, text
    assert all(low <= high for low, high in pairwise(found))


def test_counts_of_any_size_are_short_and_right() -> None:
    counts = sorted({int(number) for number in drawn_numbers(0, 15)} | {9_999, 10_000, 999_600, 10**13, 10**15})
    texts = [count_text(count) for count in counts]
    factors = zip(("", "k", "M", "G", "T"), (1, 10**3, 10**6, 10**9, 10**12), strict=True)
    assert_right([Fraction(count) for count in counts], texts, {unit: Fraction(f) for unit, f in factors}, Fraction(0))
    assert max(map(len, texts)) <= 6
    assert [count_text(n) for n in (0, 9_999, 10_000, 999_499, 999_600, 10**13, 10**15)] == [
        "0", "9,999", "10k", "999k", "1M", "10T", "1,000T",
    ]  # fmt: skip


def test_times_of_any_length_are_right() -> None:
    times = drawn_numbers(-15, 15)
    units = {unit: Fraction(10) ** power for unit, power in ((" ns", -9), (" us", -6), (" ms", -3), (" s", 0))}
    assert_right(times, [time_text(float(each)) for each in times], units, Fraction(1, 10**12))
    assert [time_text(s) for s in (0.0, 1e-12, 999.6e-9, 9.996e-4, 0.9996, 999.4, 999.6, 1500.0, 1e15)] == [
        "0 ns", "0.001 ns", "1 us", "1 ms", "1 s", "999 s", "1,000 s", "1,500 s", "1,000,000,000,000,000 s",
    ]  # fmt: skip


@pytest.mark.parametrize(("low", "high"), [(5000, 8000), (802816, 827688), (1000, 2100)])
def test_sizes_close_to_each_other_have_ticks_too(low, high):
    ticks = size_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 6 and all(low <= tick <= high for tick in ticks)
    assert len({format_size(tick) for tick in ticks}) == len(ticks)
