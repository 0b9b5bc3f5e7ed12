"""Scenes as one PNG; needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clcomm.drawing.scene import FONT, ROLES, SAMPLE, Dot, Key, Mark, Path, Rect, Scene, Text, text_width
from clcomm.errors import ArgumentError, pip_install
from clcomm.storage.files import replacing, unwritable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Pixels: around and between scenes, a scene's title, a row of its legend, and a legend's sample with its gap.
_GAP, _TITLE, _ROW, _SAMPLE = 24, 26, 18, SAMPLE + 6
_POINT = 0.72  # points in a pixel, of which an inch has 100


def draw(scenes: Sequence[Scene], path: str, option: str, title: str = "", *, width: float = 1300) -> None:
    """Draw the scenes in two columns, wide ones across both; raises ArgumentError if `path` cannot be written.

    Args:
        title: the lines above the scenes.
        option: the option with the path, for messages.
        width: the picture's width, in pixels before the resolution is raised by a fifth.
    """
    figure = figure_of(scenes, title, width)
    try:
        with replacing(path) as file:
            figure.savefig(file, dpi=120, format="png")
    except OSError as error:
        raise unwritable(option, path, error) from None


def require_matplotlib(option: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(f"{option}: needs matplotlib, which is not installed; {pip_install('plot')}")


def figure_of(scenes: Sequence[Scene], title: str, width: float) -> Figure:
    """Return the figure: one pair of axes in pixels that holds every mark."""
    from matplotlib.figure import Figure

    lines = title.splitlines()
    top = _GAP + 1.3 * FONT * len(lines)
    placed, height = _placed(scenes, top, width)
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for number, line in enumerate(lines):
        _text(axes, Text(0.5, _GAP + 1.3 * FONT * number, line, "middle", colour="ink"), 0.0, 0.0, width)
    for scene, left, at, across in placed:
        _scene(axes, scene, left, at, across)
    return figure


def _placed(scenes: Sequence[Scene], top: float, width: float) -> tuple[list[tuple[Scene, float, float, float]], float]:
    """Return each scene with its left end, top and width, in the column that is shorter so far; and the height."""
    column, ends, found = (width - 3 * _GAP) / 2, [top, top], []
    for scene in scenes:
        wide = scene.wide or len(scenes) == 1
        across = width - 2 * _GAP if wide else column
        at, side = (max(ends), 0) if wide else min(zip(ends, (0, 1), strict=True))
        end = at + _TITLE + scene.height + _ROW * len(_legend_rows(scene, across)) + _GAP
        ends = [end, end] if wide else [end if each == side else ends[each] for each in (0, 1)]
        found.append((scene, _GAP + side * (column + _GAP), at, across))
    return found, max(ends)


def _scene(axes: Axes, scene: Scene, left: float, top: float, across: float) -> None:
    _text(axes, Text(0.0, FONT, scene.title, colour="ink", bold=True), left, top, across)
    _text(axes, Text(0.0, FONT, scene.note, shift=text_width(scene.title) + 16), left, top, across)
    top += _TITLE
    _draw(axes, scene.marks, left + scene.left, top, across - scene.left - scene.right)
    for number, row in enumerate(_legend_rows(scene, across)):
        for at, key in row:
            y = top + scene.height + _ROW * number + _ROW - SAMPLE
            _draw(axes, key.sample, left + at, y, SAMPLE)
            words = f"{key.name} {key.value}".strip()
            _text(axes, Text(0.0, SAMPLE - 1, words), left + at + _SAMPLE, y, across)


def _legend_rows(scene: Scene, across: float) -> list[list[tuple[float, Key]]]:
    """Return the legend's entries in rows that are not wider than the scene, each with its place."""
    rows: list[list[tuple[float, Key]]] = []
    at = across
    for key in scene.keys:
        length = _SAMPLE + text_width(f"{key.name} {key.value}") + 8
        if at + length > across:
            rows.append([])
            at = 0.0
        rows[-1].append((at, key))
        at += length
    return rows


def _draw(axes: Axes, marks: Sequence[Mark], left: float, top: float, across: float) -> None:
    from matplotlib.patches import Rectangle

    for number, mark in enumerate(marks):
        if isinstance(mark, Text):
            _text(axes, mark, left, top, across, zorder=number)
        elif isinstance(mark, Rect):
            box = (left + across * mark.x, top + mark.y), across * mark.width, mark.height
            fill: dict[str, Any] = {"color": _colour(mark.fill), "alpha": mark.opacity, "linewidth": 0}
            axes.add_artist(Rectangle(*box, zorder=number, **fill))
        elif isinstance(mark, Dot):
            place, size = ([left + across * mark.x], [top + mark.y]), 2 * mark.radius * _POINT
            axes.plot(*place, "o", color=_colour(mark.colour), markersize=size, markeredgewidth=0, zorder=number)
        else:
            _path(axes, mark, left, top, across, number)


def _path(axes: Axes, mark: Path, left: float, top: float, across: float, number: int) -> None:
    x, y = [left + across * x for x, _ in mark.points], [top + y for _, y in mark.points]
    style: dict[str, Any] = {"linewidth": mark.width * _POINT, "alpha": mark.opacity, "zorder": number}
    if mark.fill:
        axes.fill(x, y, color=_colour(mark.fill), **{**style, "linewidth": 0})
    else:
        dash = (0, [each / mark.width for each in mark.dash]) if mark.dash else "-"
        axes.plot(x, y, color=_colour(mark.colour), linestyle=dash, solid_capstyle="butt", **style)


def _text(axes: Axes, mark: Text, left: float, top: float, across: float, **style: Any) -> None:
    from matplotlib.patheffects import withStroke

    axes.text(
        left + across * mark.x + mark.shift, top + mark.y, mark.words, parse_math=False, fontsize=FONT * _POINT,
        weight="bold" if mark.bold else "normal",
        color=_colour(mark.colour), ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
        path_effects=[withStroke(linewidth=4 * _POINT, foreground=_colour(mark.halo))], **style,
    )  # fmt: skip


def _colour(colour: str) -> str:
    return ROLES.get(colour, colour)
