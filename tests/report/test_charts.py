"""Charts: they hold what the tables say, and their axes have names and round ticks."""

from __future__ import annotations

import re

import pytest

from clcomm.report.axes import CALLS, SIZE, TIME, log_ticks, size_text, size_ticks, time_text
from clcomm.report.elements import Bars, Distribution, Points
from clcomm.report.html import as_html
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


@pytest.mark.parametrize(("low", "high"), [(5000, 8000), (802816, 827688), (1000, 2100)])
def test_sizes_close_to_each_other_have_ticks_too(low, high):
    ticks = size_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 6 and all(low <= tick <= high for tick in ticks)
    assert len({size_text(tick) for tick in ticks}) == len(ticks)
