"""Colours: readers with any colour vision tell parts apart, and figures on them are legible."""

from __future__ import annotations

from itertools import combinations

import pytest

from clcomm.insight.drawing.scene import ink_on, luminance, painted, stripe_of, text_on
from clcomm.insight.report import step_parts
from clcomm.insight.report.elements import PAINTS, paint_of
from tests.colour_vision import APART, distance, rgb

#: Parts that stand for one thing and never in one chart: a run's data moves compressed, or not, or to itself.
ALIKE = (
    {step_parts.moving(True, True), step_parts.moving(True, False), step_parts.moving(False, False)},
    {step_parts.WAIT, "came last"},
)


@pytest.mark.parametrize(("first", "second"), list(combinations(PAINTS, 2)))
def test_parts_differ_by_colour_or_stripes_for_every_reader(first: str, second: str) -> None:
    one, other = PAINTS[first], PAINTS[second]
    if any({first, second} <= alike for alike in ALIKE):
        assert one == other
    else:
        assert one.striped != other.striped or distance(rgb(one.colour), rgb(other.colour)) > APART


def test_every_part_has_a_colour_of_its_own_choice() -> None:
    constants = (
        "DATA", "COMPUTING", "OPTIMIZER", "DEVICE", "PACK", "WAIT", "EITHER", "UNPACK", "HIDDEN", "CORE", "REST",
        "COMPUTING_TOO", "CLIPPING",
    )  # fmt: skip
    names = {getattr(step_parts, name) for name in constants}
    assert names | set(step_parts.OTHER_LABELS.values()) <= set(PAINTS)


@pytest.mark.parametrize("part", PAINTS)
def test_figures_are_legible_on_every_part(part: str) -> None:
    paint, ink = paint_of(part), ink_on(paint_of(part))
    behind = [paint.colour, stripe_of(paint)] if paint.striped else [paint.colour]
    for colour in behind:
        light, dark = sorted((luminance(colour), luminance(ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= (3.0 if paint.striped else 4.5)  # stripes have a halo behind figures
    assert {each.fill for each in painted(0, 0, 1, 20, paint)} == set(behind)
    assert text_on(paint, 0, 0, "1")[5:7] == (ink, behind[-1])


def test_the_simulation_sees_what_is_known() -> None:
    assert distance(rgb("#ff0000"), rgb("#ff0000")) == 0
    assert distance(rgb("#2f7d4f"), rgb("#8a6d3b")) < APART  # green and brown, which deuteranopes take for each other
    assert distance(rgb("#000000"), rgb("#ffffff")) == pytest.approx(100, abs=0.1)
