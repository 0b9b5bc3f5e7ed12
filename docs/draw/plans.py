"""Drawings that show no measurement: how memory and files are laid out."""

from __future__ import annotations

import pathlib
import re
import textwrap

from clcomm.insight.drawing.scene import Mark, Path, Rect, Text, arrow
from docs.extensions.svg import BLUE, GREEN, LINE, PURPLE, VERMILLION, svg

#: The page whose table lists the wings.
ARCHITECTURE = pathlib.Path(__file__).resolve().parent.parent / "architecture.md"
_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE)


def all_drawings() -> dict[str, str]:
    return {"shared-window": shared_window(), "wings": wings(), "life-of-a-gradient": life_of_a_gradient()}


def _arrow(x: float, begin: float, end: float) -> list[Mark]:
    return arrow((x, begin), (x, end), "ink", 1.0)


def shared_window() -> str:
    """Four ranks' gradients, of which each rank sums a quarter into one memory."""
    parts: list[Mark] = []
    width, left = 130.0, 96.0
    for rank in range(4):
        y = 28 + rank * 30
        parts.append(Text(0, y + 15, f"rank {rank}'s grads"))
        places = ((left + 24 + shard * (width + 6), _COLOURS[shard]) for shard in range(4))
        parts += [Rect(x, y, width, 20, colour, opacity=0.35) for x, colour in places]
    for shard in range(4):
        x = left + 24 + shard * (width + 6)
        parts += [Text(x + width / 2, 18, f"shard {shard}", "middle"), *_arrow(x + width / 2, 150, 186)]
        parts.append(Text(x + width / 2 + 8, 172, f"rank {shard} adds"))
        parts.append(Rect(x, 190, width, 24, _COLOURS[shard], opacity=0.5))
        parts.append(Text(x + width / 2, 207, "mean", "middle"))
    parts.append(Text(0, 207, "reduced"))
    parts.append(Text(left + 24, 236, "one memory of the host: every rank reads the mean here, nobody copies it"))
    return svg(690, 246, parts)


def wings() -> str:
    """The nine wings as the rooms of a house: each stands on those below it and before it."""
    rows = re.findall(r"^\| \*\*(\w+)\*\* \| [^|]+ \| ([^|]+?) \|", ARCHITECTURE.read_text(), re.MULTILINE)
    marks: list[Mark] = []
    width, height = 224.0, 74.0
    for number, (wing, holds) in enumerate(rows):
        x, y = 4 + number % 3 * (width + 4), 6 + (2 - number // 3) * (height + 4)
        marks.append(Rect(x, y, width, height, _COLOURS[number % len(_COLOURS)], wing, opacity=0.25))
        marks.append(Text(x + 10, y + 20, f"{number + 1}  {wing}", bold=True))
        lines = textwrap.wrap(holds.replace("`", ""), 34)[:3]
        marks += [Text(x + 10, y + 36 + 15 * line, text) for line, text in enumerate(lines)]
    marks.append(Text(4, 6 + 3 * (height + 4) + 14, "A wing imports from wings with smaller numbers only."))
    return svg(690, 3 * (height + 4) + 8 + LINE, marks)


def life_of_a_gradient() -> str:
    """The functions that a gradient passes, from top to bottom, and the memories between them."""
    boxes = [
        ("loss.backward(), on each rank", "LinearOp.backward queues the gradient's kernel", True),
        ("grads: a window of each rank, readable by the others", "", False),
        (
            "sync.sync_gradients(model), on each rank",
            "Synchronizer, ModelSync, BucketPlan; GradMoves._pull waits",
            True,
        ),
        ("for each bucket: OneKernelAllReduce", "one kernel meets the ranks and sums parts of it", True),
        ("reduced: one memory for all ranks of the host", "", False),
        ("optimizer.step(), on each rank", "Optimizer.update_range queues its kernel, which reads reduced", True),
    ]
    parts: list[Mark] = []
    tops, heights, y = [], [], 6.0
    for title, below, is_function in boxes:
        height = 46.0 if below else 30.0
        parts.append(Rect(_LEFT, y, _RIGHT - _LEFT, height, VERMILLION if is_function else BLUE, opacity=0.18))
        parts += [Text(_CENTRE, y + 20, title, "middle", bold=True), Text(_CENTRE, y + 37, below, "middle")]
        tops.append(y)
        heights.append(height)
        y += height + 24
    backward, grads, sync, bucket, reduced, optimizer = range(len(boxes))
    ends = [top + height for top, height in zip(tops, heights, strict=True)]
    middles = [top + height / 2 for top, height in zip(tops, heights, strict=True)]
    for begin, end in ((backward, grads), (bucket, reduced), (reduced, optimizer)):
        parts += _bent([(_CENTRE, ends[begin]), (_CENTRE, tops[end])], _DATA)
    parts += _bent(_beside(_RIGHT, 30, middles[grads], middles[bucket]), _DATA)
    parts += _bent([(_CENTRE, ends[sync]), (_CENTRE, tops[bucket])], _CALLS)
    parts += _bent(_beside(_LEFT, -24, middles[backward] + 8, middles[sync]), _CALLS)
    parts += _bent(_beside(_LEFT, -24, middles[bucket] + 8, middles[optimizer]), _CALLS)
    parts += _bent(_beside(_LEFT, -56, middles[backward] - 8, middles[bucket] - 8), _CALLS, (3.0, 3.0))
    parts.append(Text(_LEFT, y + 4, "Dotted: with overlap a bucket starts within backward, Overlap._complete."))
    return svg(610, y + LINE, parts)


#: Edges of the boxes of the life of a gradient, and the widths of lines for data and for calls.
_LEFT, _RIGHT = 90.0, 550.0
_CENTRE = (_LEFT + _RIGHT) / 2
_DATA, _CALLS = 4.0, 1.5
Points = list[tuple[float, float]]


def _beside(edge: float, out: float, begin: float, end: float) -> Points:
    """Return the way from a box's edge to that of a lower one, `out` pixels away from both."""
    return [(edge, begin), (edge + out, begin), (edge + out, end), (edge, end)]


def _bent(points: Points, width: float, dash: tuple[float, ...] = ()) -> list[Mark]:
    """Return an arrow along straight lines, of which it ends with its head at the last point."""
    *_, before, end = points
    shaft, head = arrow(before, end, "ink", 1.0)
    assert isinstance(shaft, Path)
    return [Path([*points[:-1], shaft.points[-1]], "ink", width, dash), head]
