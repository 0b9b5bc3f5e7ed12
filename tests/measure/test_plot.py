"""The drawing of `clcomm bench`: nothing hides anything, and every axis has something to say."""

from __future__ import annotations

from clcomm.insight.drawing.scene import Dot, Path, Text
from clcomm.insight.measure.plot import draw_bench, scenes
from tests.drawn import texts_of

TRANSPORTS = ("shared", "mpi", "solo")


def row(operation: str, transport: str, nbytes: int, busbw: float) -> dict:
    times = {"min_us": 9.0 + nbytes, "p50_us": 10.0 + nbytes, "p99_us": 40.0 + nbytes}
    names = {"operation": operation, "transport": transport, "dtype": "float32"}
    return {**names, **times, "bytes": nbytes, "busbw_gb_s": busbw}


def test_many_lines_differ_and_the_legend_names_them():
    operations = ("all_reduce", "broadcast", "all_gather", "gather")
    rows = [row(name, each, nbytes, 1.0) for name in operations for each in TRANSPORTS for nbytes in (256, 1024)]
    times, bandwidths = scenes(rows)
    assert [key.name for key in times.keys][:2] == ["all_reduce, shared", "all_reduce, mpi"]
    samples = [(line.colour, line.dash) for key in times.keys for line in key.sample]
    assert len(set(samples)) == len(samples) == 12
    for scene in (times, bandwidths):
        lines = [mark for mark in scene.marks if isinstance(mark, Path) and mark.width == 2]
        assert [(line.colour, line.dash) for line in lines] == samples
        assert sum(isinstance(mark, Dot) for mark in scene.marks) == len(rows)
    assert sum(isinstance(mark, Path) and bool(mark.fill) for mark in times.marks) == 12


def test_where_nothing_crosses_a_link_there_are_times_alone():
    assert [scene.title for scene in scenes([row("all_reduce", "auto", nbytes, 0.0) for nbytes in (256, 1024)])] == [
        "Time of a call"
    ]


def test_one_size_has_plain_numbers_at_its_axes():
    for scene in scenes([row("all_reduce", "shared", 256, 0.03)]):
        labels = [mark.words for mark in scene.marks if isinstance(mark, Text) and mark.anchor == "end"]
        assert labels and all(float(label) > 0 for label in labels)


def test_the_picture_has_everything_and_no_texts_on_each_other(tmp_path):
    rows = [row("all_reduce", each, 4**power, 1.0) for each in TRANSPORTS for power in range(4, 13)]
    draw_bench({"rows": rows, "world_size": 4, "ranks_per_host": 4}, str(tmp_path / "rows.svg"))
    assert "4 ranks, 4 a host" in {box.words for box in texts_of(tmp_path / "rows.svg")}
