"""Every kind of run as a picture: no place without a chart, every chart with its values, no labels that overlap."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from clcomm.report.shapes import Bars, Curves, Timeline
from tests.report.families import KINDS, Kind, reported

pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'clcomm[plot]'")
from clcomm.report import png


def texts(axes: Any) -> list[Any]:
    """Return the texts that name an axis's ticks and rows, those that are shown."""
    labels = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    return [each for each in labels if each.get_text() and each.get_visible()]


OF = {kind.name: kind for kind in KINDS}
#: A picture takes seconds; all of them: `make pages`.
CASES = (
    [(kind, ranks) for kind in KINDS for ranks in (1, 2, 4, 12, 16)]
    if os.environ.get("CLCOMM_PAGE_FAMILY")
    else [(OF["overlap"], 12), (OF["per tensor"], 2), (OF["one step"], 1), (OF["an old file"], 4)]
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
        boxes = [each.get_window_extent().shrunk(0.95, 0.9) for each in texts(axes)]
        inside = [box for box in boxes if axes.get_window_extent().padded(60).overlaps(box)]
        assert not any(a.overlaps(b) for a, b in combinations(inside, 2))
