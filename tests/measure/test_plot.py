"""The drawing of `clcomm bench`: nothing hides anything, and every axis has something to say."""

from __future__ import annotations

import pytest

from clcomm.measure.plot import draw_bench

figures = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed; pip install 'clcomm[plot]'")
TRANSPORTS = ("shared", "mpi", "solo")


def row(operation: str, transport: str, nbytes: int, busbw: float) -> dict:
    times = {"min_us": 9.0 + nbytes, "p50_us": 10.0 + nbytes, "p99_us": 40.0 + nbytes}
    names = {"operation": operation, "transport": transport, "dtype": "float32"}
    return {**names, **times, "bytes": nbytes, "busbw_gb_s": busbw}


@pytest.fixture(name="drawn")
def make_drawn(monkeypatch, tmp_path):
    """Return a function that draws rows and returns the figure."""
    kept, save = [], figures.Figure.savefig

    def save_and_keep(self, *arguments, **keywords):
        kept.append(self)
        save(self, *arguments, **keywords)

    monkeypatch.setattr(figures.Figure, "savefig", save_and_keep)

    def drawn(rows: list[dict], ranks: int):
        draw_bench({"rows": rows, "world_size": ranks, "ranks_per_host": ranks}, str(tmp_path / "rows.png"))
        return kept.pop()

    return drawn


def test_many_lines_differ_and_their_legend_covers_none(drawn):
    operations = ("all_reduce", "broadcast", "all_gather", "gather")
    rows = [row(name, each, nbytes, 1.0) for name in operations for each in TRANSPORTS for nbytes in (256, 1024)]
    figure = drawn(rows, 4)
    times, bandwidths = figure.axes
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["all_reduce, shared", "all_reduce, mpi"]
    for axes in (times, bandwidths):
        assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == len(axes.lines) == 12
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_where_nothing_crosses_a_link_there_are_times_alone(drawn):
    figure = drawn([row("all_reduce", "auto", nbytes, 0.0) for nbytes in (256, 1024)], 1)
    assert len(figure.axes) == 1
    assert figure.get_suptitle() == "1 rank"


def test_one_size_has_plain_numbers_at_its_axes(drawn):
    for axes in drawn([row("all_reduce", "shared", 256, 0.03)], 2).axes:
        labels = [text.get_text() for which in ("major", "minor") for text in axes.get_yticklabels(which=which)]
        assert "".join(labels) and all(label == "" or float(label) > 0 for label in labels)
