"""`clcomm algorithms`: the formulas' figures, the drawing in text and as a picture."""

from __future__ import annotations

import re

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.base.schedules import ALGORITHMS, schedule_of
from clcomm.comm.costs.forecast import traffic
from clcomm.insight.drawing.scene import Path
from clcomm.insight.measure.plot import scene_of
from clcomm.tools import cli
from tests.drawn import texts_of
from tests.helpers import one_line


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_table_has_the_formulas_and_the_drawing_follows(monkeypatch, capsys, ranks, algorithm):
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["algorithms", "--ranks", str(ranks), "--size", "1000B", "--draw", algorithm])
    shown = capsys.readouterr().out
    for name in ALGORITHMS:
        expected = traffic(name, ranks)
        cells = re.search(rf"^{name} +(\d+) +([\d,]+) +([\d,]+) ", shown, re.MULTILINE).groups()
        assert [int(cell.replace(",", "")) for cell in cells] == [*expected[:2], 1000 * expected.volume]
    assert shown.endswith(schedule_of(algorithm, ranks).drawing() + "\n")


def test_the_time_is_that_of_the_cost_model(monkeypatch, capsys):
    """A ring of 4: 6 messages of a quarter."""
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["algorithms", "--size", "1000000", "--link-us", "10", "--link-gb-s", "1"])
    assert re.search(r"^ring +6 +24 +6,000,000 +1,560", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 6])
def test_the_picture_has_an_arrow_for_each_message(tmp_path, algorithm, ranks):
    path = tmp_path / "drawn.svg"
    cli.main(["algorithms", "--draw", algorithm, "--ranks", str(ranks), "--plot", str(path)])
    texts_of(path)
    schedule = schedule_of(algorithm, ranks)
    arrows = [mark for mark in scene_of(schedule).marks if isinstance(mark, Path) and mark.width == 1.5]
    expected = [each.adds for messages in schedule.rounds for each in messages]
    assert [not arrow.dash for arrow in arrows] == expected and len(expected) == schedule.messages


def test_a_picture_of_another_kind_is_refused():
    with pytest.raises(ArgumentError, match=r"^--plot: expected a file whose name ends in \.svg") as caught:
        cli.main(["algorithms", "--plot", "x.png"])
    one_line(caught)
