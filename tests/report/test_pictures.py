"""Every kind of run as a picture: each scene with all of its marks, side by side, no texts that overlap."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from clcomm.insight.drawing import svg
from clcomm.insight.drawing.scene import NARROWEST, Scene, Text
from clcomm.insight.report.chart_kinds import Bars, Curve, Curves, Timeline
from tests.drawn import texts_of
from tests.report.families import KINDS, Kind, reported

WIDTH = 1300
OF = {kind.name: kind for kind in KINDS}
#: A picture takes seconds; all of them: `make pages`.
ALL = bool(os.environ.get("CLCOMM_PAGE_FAMILY"))
CASES = (
    [(kind, ranks) for kind in KINDS for ranks in (1, 2, 4, 12, 16)]
    if ALL
    else [(OF["overlap"], 12), (OF["per tensor"], 2), (OF["one step"], 1), (OF["timings alone"], 4)]
)


def drawn_texts(scenes: list[Scene], folder: Path, title: str = "") -> set[str]:
    """Draw scenes and return their texts, after checking that none overlap or leave the picture."""
    svg.draw(scenes, str(file := folder / "drawn.svg"), "-o", title, width=WIDTH)
    return {box.words for box in texts_of(file)}


@pytest.mark.parametrize(("kind", "ranks"), CASES, ids=lambda each: str(getattr(each, "name", each)))
def test_a_picture_of_any_run(kind: Kind, ranks: int, tmp_path: Path) -> None:
    report = reported(kind, ranks, tmp_path)
    scenes = [chart.scene() for chart in report.charts]
    texts = drawn_texts(scenes, tmp_path, f"{report.title}\n{report.subtitle}")
    assert {report.title, report.subtitle, *(chart.title for chart in report.charts)} <= texts
    for chart, scene in zip(report.charts, scenes, strict=True):
        words = [mark.words for mark in scene.marks if isinstance(mark, Text)]
        assert len(words) > 1 and {word for word in words if word} <= texts
        if isinstance(chart, Bars | Timeline):
            keys = [key.name for key in scene.keys if key.name in chart.parts]
            assert keys == list(chart.parts) or len(chart.parts) == 1
    for number, (scene, left, top, across) in enumerate(placed := svg.placed_scenes(scenes, 0, WIDTH)[0]):
        end = top + scene.height
        assert 0 <= left < left + across <= WIDTH and across - scene.left - scene.right > NARROWEST
        for other, their_left, their_top, their_across in placed[:number]:
            beside = left >= their_left + their_across or their_left >= left + across
            assert beside or top >= their_top + other.height or their_top >= end


def test_curves_over_any_span_have_ticks_to_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(40 if ALL else 12):
        low, decades = 10 ** rng.uniform(-3, 3), rng.uniform(0.01, 6)
        values = [float(low * 10 ** (decades * share)) for share in (0, *rng.uniform(0, 1, 10), 1)]
        names = ("loss", "step (ms)", "more (ms)")
        scene = Curves("Steps", range(12), [Curve(name, values) for name in names]).scene()
        drawn_texts([scene], tmp_path)
        ticks = [mark.words for mark in scene.marks if isinstance(mark, Text) and mark.anchor == "end"]
        assert len(ticks) >= 2 * len(names), (low, decades)
        assert all(re.fullmatch(r"-?[\d.,]+", tick) for tick in ticks), ticks


def test_the_check_would_have_seen(tmp_path: Path) -> None:
    """The tests above can fail: texts that lie on each other are seen, and those outside the picture."""
    near = [Text(0.5, 20.0, "p95 1 ms"), Text(0.5, 26.0, "p99 2 ms")]
    for wrong in (near, [Text(1.0, 20.0, "a text that ends outside", shift=20.0)]):
        with pytest.raises(AssertionError):
            drawn_texts([Scene("Title", 60.0, wrong)], tmp_path)
    assert drawn_texts([Scene("Title", 60.0, [near[0], Text(0.5, 40.0, "p99 2 ms")])], tmp_path) > {"p95 1 ms"}
