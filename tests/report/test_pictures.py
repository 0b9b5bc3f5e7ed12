"""Every kind of run as a picture: no place without a chart, every chart with its values, no labels that overlap."""

from __future__ import annotations

import os
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clcomm.report.elements import Bars, Curve, Curves, Timeline
from clcomm.report.report import Report
from tests.report.families import KINDS, Kind, reported

pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'clcomm[plot]'")
from clcomm.report import png


def texts(axes: Any) -> list[Any]:
    """Return the texts that name an axis's ticks and rows, those that are shown, of small ticks too."""
    labels = [label for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels(which="both")]
    return [each for each in labels if each.get_text() and each.get_visible()]


def overlapping(axes: Any) -> list[tuple[str, str]]:
    """Return the pairs of ticks whose names lie on each other."""
    inside = axes.get_window_extent().padded(60)
    boxes = [(each.get_text(), each.get_window_extent().shrunk(0.95, 0.9)) for each in texts(axes)]
    boxes = [(text, box) for text, box in boxes if inside.overlaps(box)]
    return [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]


OF = {kind.name: kind for kind in KINDS}
#: A picture takes seconds; all of them: `make pages`.
ALL = bool(os.environ.get("CLCOMM_PAGE_FAMILY"))
CASES = (
    [(kind, ranks) for kind in KINDS for ranks in (1, 2, 4, 12, 16)]
    if ALL
    else [(OF["overlap"], 12), (OF["per tensor"], 2), (OF["one step"], 1), (OF["timings alone"], 4)]
)


@pytest.mark.parametrize(("kind", "ranks"), CASES, ids=lambda each: str(getattr(each, "name", each)))
def test_a_picture_of_any_run(kind: Kind, ranks: int, tmp_path: Path) -> None:
    report = reported(kind, ranks, tmp_path)
    figure = png.figure_of(report)
    expected = sum(len(chart.curves) if isinstance(chart, Curves) else 1 for chart in report.charts)
    assert len(figure.axes) == expected
    for axes in figure.axes:
        assert axes.get_visible() and (axes.lines or axes.patches or axes.collections)
    by_title = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}
    for chart in report.charts:
        axes = next(axes for title, axes in by_title.items() if title.startswith(chart.title))
        if isinstance(chart, Bars):
            drawn = sorted(patch.get_width() for patch in axes.patches)
            assert drawn == pytest.approx(sorted(value for row in chart.values for value in row))
            assert {label.get_text() for label in axes.get_yticklabels()} == set(chart.bars)
        if isinstance(chart, Timeline):
            assert sum(len(each.get_paths()) for each in axes.collections) == len(chart.stretches) + len(chart.behind)
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert not overlapping(axes)
    for chart in report.charts:
        if isinstance(chart, Bars | Timeline):
            a_legend_lies_below_its_chart(by_title[chart.title], chart)
    for row in png._rows_of(report.charts):
        assert max(map(png._height, row)) <= 1.3 * min(map(png._height, row))


def a_legend_lies_below_its_chart(axes: Any, chart: Bars | Timeline) -> None:
    """Fail unless it has the chart's order of parts, and is no wider than the chart and on none of its labels."""
    legend = axes.get_legend()
    if legend is None:
        return
    names = [each.get_text() for each in legend.get_texts()]
    assert names[: len(chart.parts)] == [part for part in chart.parts if part in names]
    box, inside = legend.get_window_extent(), axes.get_window_extent()
    assert box.x1 <= inside.x1 + 1
    assert all(box.y1 <= each.get_window_extent().y0 + 1 for each in [*axes.get_xticklabels(), axes.xaxis.label])


def test_curves_over_any_span_have_ticks_to_read() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40 if ALL else 12):
        low, decades = 10 ** rng.uniform(-3, 3), rng.uniform(0.01, 6)
        values = [float(low * 10 ** (decades * share)) for share in (0, *rng.uniform(0, 1, 10), 1)]
        chart = Curves("Steps", range(12), [Curve(name, values) for name in ("loss", "step (ms)", "more (ms)")])
        figure = png.figure_of(Report("", {}, [], [], [], [chart], []))
        figure.draw_without_rendering()
        for axes in figure.axes:
            names = [each.get_text().replace("\N{MINUS SIGN}", "-") for each in texts(axes)]
            assert len(axes.get_yticks()) >= 2 and not overlapping(axes), (low, decades)
            assert all(re.fullmatch(r"-?[\d.,]+", name) for name in names), names
