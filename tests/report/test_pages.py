"""Every kind of run as a page: no labels that overlap, no empty chart, and the figures that the JSON has."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clcomm.insight.drawing.scene import FONT, NARROWEST, text_width
from clcomm.insight.report import build, read_runs
from clcomm.insight.report.formats import as_html, as_json
from tests.report.families import KINDS, Kind, reported
from tests.report.runs import document, written

#: Every number of ranks takes a minute: `make pages`.
RANKS = range(1, 17) if os.environ.get("CLCOMM_PAGE_FAMILY") else (1, 2, 4, 12, 16)
Box = tuple[float, float, float, float]


class Figures(HTMLParser):
    """The figures of a page: for each its title, and its elements as (tag, attributes, text)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, dict[str, str], str]]]] = []
        self._open: list[tuple[str, dict[str, str], str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "figure":
            self.found.append(("", []))
        if self.found:
            self.found[-1][1].append((tag, {name: value or "" for name, value in attrs}, ""))

    handle_startendtag = handle_starttag

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][1] and data.strip():
            title, elements = self.found[-1]
            tag, attributes, text = elements[-1]
            elements[-1] = (tag, attributes, text + data)
            if tag == "figcaption" and not title:
                self.found[-1] = (data.strip(), elements)

    def handle_endtag(self, tag: str) -> None:
        if tag == "figure":
            self.found.append(("", []))  # what follows belongs to none

    def by_title(self) -> dict[str, list[tuple[str, dict[str, str], str]]]:
        return {title: elements for title, elements in self.found if title}


def boxes(elements: list[tuple[str, dict[str, str], str]], room: float) -> list[tuple[str, Box]]:
    """Return each text of an SVG with the box that it fills where the plot is `room` pixels wide."""
    found = []
    for tag, attributes, text in elements:
        if tag == "text":
            x = float(attributes["x"].removesuffix("%")) / 100 * room + float(attributes.get("dx", 0))
            y, width = float(attributes["y"]), text_width(text)
            left = {"start": x, "middle": x - width / 2, "end": x - width}[attributes["text-anchor"]]
            found.append((text, (left, y - 0.75 * FONT, left + width, y + 0.2 * FONT)))
    return found


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def percent(attributes: dict[str, str], what: str) -> float:
    return float(attributes[what].removesuffix("%"))


def with_notes(elements: list[tuple[str, dict[str, str], str]]) -> list[tuple[dict[str, str], str]]:
    """Return the attributes of each rectangle that has a note, and the note."""
    return [(one[1], other[2]) for one, other in pairwise(elements) if (one[0], other[0]) == ("rect", "title")]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_page_of_any_run(kind: Kind, ranks: int, tmp_path: Path) -> None:
    report = reported(kind, ranks, tmp_path)
    page = as_html(report)
    figures = Figures(page).by_title()
    charts: list[dict[str, Any]] = json.loads(as_json(report))["charts"]
    assert list(figures) == [chart["title"] for chart in charts]
    for chart in charts:
        CHECKS[chart["kind"]](chart, figures[chart["title"]])
        check_texts(figures[chart["title"]])
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert not re.search(r"<(script|img|iframe|object|embed)\b|@import|url\(|\bnan\b|\binf\b", page)
    assert {chart["kind"] for chart in charts} >= ({"bars"} if kind.timings_alone else {"bars", "timeline", "curves"})


def check_texts(elements: list[tuple[str, dict[str, str], str]]) -> None:
    (drawn,) = (attributes for tag, attributes, _ in elements if tag == "svg" and "aria-label" in attributes)
    padding = re.fullmatch(r"padding:0 (\d+)px 0 (\d+)px", drawn["style"])
    assert padding
    right, left = map(int, padding.groups())
    for room in (NARROWEST + 96 - left - right, 500, 1100):  # the page is 96 pixels wider at least
        found = boxes(elements, room)
        for number, (text, box) in enumerate(found):
            assert box[0] >= -left - 1 and box[1] >= -1, (text, room)
            assert box[2] <= room + right + 1 and box[3] <= float(drawn["height"]) + 1, (text, room)
            for other, theirs in found[:number]:
                assert not overlap(box, theirs), (text, other, room)


def check_bars(chart: dict[str, Any], elements: list[tuple[str, dict[str, str], str]]) -> None:
    pieces = with_notes(elements)
    whole = max([*map(sum, chart["values"]), (chart["mark"] or ["", 0])[1]])
    expected = [
        (f"{bar}, {part}: {value:.3f} {chart['unit']}", 100 * value / whole)
        for bar, values in zip(chart["bars"], chart["values"], strict=True)
        for part, value in zip(chart["parts"], values, strict=True)
        if value > 0
    ]
    assert expected and [note for _, note in pieces] == [note for note, _ in expected]
    assert [percent(attributes, "width") for attributes, _ in pieces] == pytest.approx(
        [share for _, share in expected], abs=1e-3
    )
    on_bars = {
        (attributes["y"], attributes["x"]): text
        for tag, attributes, text in elements
        if tag == "text" and attributes["text-anchor"] == "middle"
    }
    for attributes, note in pieces:  # what stands on a bar is its value, and has room
        middle = percent(attributes, "x") + percent(attributes, "width") / 2
        y = float(attributes["y"])
        texts = [key for key in on_bars if y < float(key[0]) < y + 20 and abs(float(key[1][:-1]) - middle) < 2e-3]
        for text in map(on_bars.pop, texts):
            value = float(note.rsplit(": ")[-1].split()[0])
            assert float(text.replace(",", "")) == pytest.approx(value, rel=6e-3, abs=6e-4)
            assert percent(attributes, "width") >= 4 * len(text)
    assert not on_bars


def check_timeline(chart: dict[str, Any], elements: list[tuple[str, dict[str, str], str]]) -> None:
    drawn = [attributes for attributes, _ in with_notes(elements)]
    stretches = [*chart["stretches"], *chart["behind"]]
    assert len(drawn) == len(stretches) > 0
    assert all(percent(each, "x") + percent(each, "width") <= 100.2 for each in drawn)
    assert {part for _, part, *_ in stretches} == set(chart["parts"])
    for row in range(len(chart["rows"])):
        own = [each for each in chart["stretches"] if each[0] == row]
        assert own and all(a[4] <= b[3] + 1e-9 for a, b in pairwise(own))
        assert 1 <= sum(1 for at, _ in chart["steps"] if at == row) <= 3


def check_curves(chart: dict[str, Any], elements: list[tuple[str, dict[str, str], str]]) -> None:
    lines = [attributes["points"].split() for tag, attributes, _ in elements if tag == "polyline"]
    dots = [(percent(each, "cx"), float(each["cy"])) for tag, each, _ in elements if tag == "circle"]
    dotted = len(chart["steps"]) <= 30
    for name, values in chart["curves"]:
        known = [value for value in values if value is not None]
        assert len(values) == len(chart["steps"]) > 0
        if not known:
            assert any(text == f"{name}: not known" for tag, _, text in elements if tag == "text")
            continue
        if dotted:
            points, dots = dots[: len(known)], dots[len(known) :]
        joined = [tuple(map(float, point.split(","))) for point in lines.pop(0)] if len(known) > 2 else []
        points = points if dotted else joined
        assert len(joined) == (len(known) if len(known) > 2 else 0)
        heights = [-y for _, y in points]
        assert len(points) == len(known) and [x for x, _ in points] == sorted(x for x, _ in points)
        assert heights[known.index(max(known))] == max(heights) and heights[known.index(min(known))] == min(heights)
    assert not lines and not dots


def check_distribution(chart: dict[str, Any], elements: list[tuple[str, dict[str, str], str]]) -> None:
    columns = [attributes for attributes, _ in with_notes(elements)]
    counts = [count for count in chart["counts"] if count]
    assert len(columns) == len(counts) > 0
    heights = [float(each["height"]) for each in columns]
    assert [height / max(heights) for height in heights] == pytest.approx(
        [count / max(counts) for count in counts], abs=0.01
    )
    assert sum(1 for tag, attributes, _ in elements if attributes.get("stroke-dasharray")) == len(chart["marks"])


def check_points(chart: dict[str, Any], elements: list[tuple[str, dict[str, str], str]]) -> None:
    assert sum(1 for tag, *_ in elements if tag == "circle") == len(chart["points"]) > 0
    assert any(tag == "polyline" for tag, *_ in elements)


CHECKS = {
    "bars": check_bars, "timeline": check_timeline, "curves": check_curves, "distribution": check_distribution,
    "points": check_points,
}  # fmt: skip


def test_the_checks_would_have_seen() -> None:
    """The tests above can fail: labels that lie on each other are seen, and those that do not are not."""
    near = [("text", {"x": "2%", "y": "20", "text-anchor": "start"}, "p95 1 ms")]
    below = [("text", {"x": "2%", "y": "31", "text-anchor": "start"}, "p99 2 ms")]
    (_, first), (_, second) = boxes(near + below, 500)
    assert overlap(first, second)
    (_, first), (_, second) = boxes([*near, ("text", {**below[0][1], "y": "38"}, "p99 2 ms")], 500)
    assert not overlap(first, second)


def test_rare_operations_are_folded(tmp_path: Path) -> None:
    page = as_html(reported(KINDS[0], 4, tmp_path))
    assert "<details>" not in page  # here all operations are of every step
    report = build(read_runs(written(tmp_path, [document(4)])))
    page = as_html(report)
    (folded,) = re.findall(r"<details><summary>(.*?)</summary>(.*?)</details>", page, re.DOTALL)
    assert folded[0].startswith("2 operations called less than once a step") and "broadcast" in folded[1]
    assert "broadcast" not in page.split('id="operations"')[1].split("<details>")[0]
