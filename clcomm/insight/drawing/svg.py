"""Scenes as SVG: within a page, where they fill the available width and texts keep their size, and as one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.base.storage.files import write_whole
from clcomm.insight.drawing.scene import FONT, ROLES, SAMPLE, Dot, Key, Mark, Path, Rect, Scene, Text, text_width

#: The units of a path's width; SVG has shares of the width for all marks but these.
_ACROSS = 1000
#: Pixels: around and between scenes, a scene's title, a row of its legend, and a legend's sample with its gap.
_GAP, _TITLE, _ROW, _SAMPLE = 24, 26, 18, SAMPLE + 6
#: A file has a light background for every reader.
_STYLE = (
    f"svg{{{';'.join(f'--{role}:{colour}' for role, colour in ROLES.items())};overflow:visible;"
    f"font-family:sans-serif;background:{ROLES['card']}}}"
    "text{fill:var(--soft);paint-order:stroke;stroke:var(--card);stroke-width:4px}"
)


def require_svg(option: str, path: str | None) -> None:
    """Raise ArgumentError unless the file's name ends in .svg."""
    if path is not None and not path.lower().endswith(".svg"):
        raise ArgumentError(f"{option}: expected a file whose name ends in .svg, got {path!r}")


def draw(scenes: Sequence[Scene], path: str, option: str, title: str = "", *, width: float = 1300) -> None:
    """Draw the scenes in two columns, wide ones across both; raises ArgumentError if `path` cannot be written.

    Args:
        title: the lines above the scenes.
        option: the option with the path, for messages.
        width: the picture's width in pixels.
    """
    lines = title.splitlines()
    placed, height = placed_scenes(scenes, _GAP + 1.3 * FONT * len(lines), width)
    marks = [Text(0.5, _GAP + 1.3 * FONT * row, line, "middle", colour="ink") for row, line in enumerate(lines)]
    body = _marks(marks, height) + "".join(_placed_scene(*each) for each in placed)
    write_whole(path, _file(body, width, height, _STYLE), option)


def placed_scenes(
    scenes: Sequence[Scene], top: float, width: float
) -> tuple[list[tuple[Scene, float, float, float]], float]:
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


def _placed_scene(scene: Scene, left: float, top: float, across: float) -> str:
    head = [
        Text(0.0, FONT, scene.title, colour="ink", bold=True),
        Text(0.0, FONT, scene.note, shift=text_width(scene.title) + 16),
    ]
    plot = _part(scene.marks, left + scene.left, top + _TITLE, across - scene.left - scene.right, scene.height)
    keys = []
    for number, row in enumerate(_legend_rows(scene, across)):
        y = top + _TITLE + scene.height + _ROW * (number + 1) - SAMPLE
        for at, key in row:
            words = Text(0.0, SAMPLE - 1, f"{key.name} {key.value}".strip(), shift=_SAMPLE)
            keys += [_part(key.sample, left + at, y, SAMPLE, SAMPLE), _part([words], left + at, y, across, SAMPLE)]
    return _part(head, left, top, across, _TITLE) + plot + "".join(keys)


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


def _part(marks: Sequence[Mark], left: float, top: float, width: float, height: float) -> str:
    place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f"<svg {place}>{_marks(marks, height)}</svg>"


def as_svg(scene: Scene) -> str:
    """Return the scene's marks and its legend as HTML; the page's style sheet has the colours of the roles."""
    style = f"padding:0 {scene.right:.0f}px 0 {scene.left:.0f}px"
    keys = "".join(
        f'<li><svg width="{SAMPLE}" height="{SAMPLE}" aria-hidden="true">{_marks(key.sample, SAMPLE)}</svg>'
        f"{escape(key.name)}{f' <b>{escape(key.value)}</b>' if key.value else ''}</li>"
        for key in scene.keys
    )
    return (
        f'<svg role="group" aria-label="{escape(scene.title)}" height="{scene.height:.0f}" style="{style}">'
        f"{_marks(scene.marks, scene.height)}</svg>" + (f'<ul class="legend">{keys}</ul>' if keys else "")
    )


def as_file(marks: Sequence[Mark], width: float, height: float, style: str) -> str:
    """Return marks as a scalable file; its style has the colours of the roles."""
    return _file(_marks(marks, height), width, height, style)


def _file(body: str, width: float, height: float, style: str) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" font-size="{FONT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{body}</svg>\n'


def _marks(marks: Sequence[Mark], height: float) -> str:
    return "".join(_path(mark, height) if isinstance(mark, Path) else _WRITE[type(mark)](mark) for mark in marks)


def _rect(mark: Rect) -> str:
    opacity = "" if mark.opacity == 1 else f' fill-opacity="{mark.opacity:g}"'
    return (
        f'<rect x="{_share(mark.x)}" y="{mark.y:.1f}" width="{_share(mark.width)}" height="{mark.height:.1f}" '
        f'fill="{_colour(mark.fill)}"{opacity}{_with_note("rect", mark.note)}'
    )


def _dot(mark: Dot) -> str:
    place = f'cx="{_share(mark.x)}" cy="{mark.y:.1f}" r="{mark.radius:g}"'
    return f'<circle {place} fill="{_colour(mark.colour)}"{_with_note("circle", mark.note)}'


def _with_note(tag: str, note: str) -> str:
    return f"><title>{escape(note)}</title></{tag}>" if note else "/>"


def _text(mark: Text) -> str:
    shift = f' dx="{mark.shift:.1f}"' if mark.shift else ""
    own = ' font-weight="bold"' if mark.bold else ""
    if (mark.colour, mark.halo) != ("soft", "card"):
        own += f' style="fill:{_colour(mark.colour)};stroke:{_colour(mark.halo)}"'
    place = f'x="{_share(mark.x)}" y="{mark.y:.1f}"{shift}'
    return f'<text {place} text-anchor="{mark.anchor}"{own}>{escape(mark.words)}</text>'


def _path(mark: Path, height: float) -> str:
    dash = f' stroke-dasharray="{" ".join(f"{each:g}" for each in mark.dash)}"' if mark.dash else ""
    style = f'stroke="{_colour(mark.colour)}" stroke-width="{mark.width:g}"{dash}'
    style = f'fill="{_colour(mark.fill)}"' if mark.fill else f'fill="none" {style}'
    style += "" if mark.opacity == 1 else f' opacity="{mark.opacity:g}"'
    if len(mark.points) == 2:
        (x1, y1), (x2, y2) = mark.points
        return f'<line x1="{_share(x1)}" y1="{y1:.1f}" x2="{_share(x2)}" y2="{y2:.1f}" {style}/>'
    points = " ".join(f"{_ACROSS * x:.1f},{y:.1f}" for x, y in mark.points)
    return (
        f'<svg viewBox="0 0 {_ACROSS} {height:.0f}" width="100%" height="{height:.0f}" preserveAspectRatio="none">'
        f'<polyline points="{points}" {style} vector-effect="non-scaling-stroke"/></svg>'
    )


def _share(x: float) -> str:
    return f"{100 * x:.3f}%"


def _colour(colour: str) -> str:
    return colour if colour.startswith("#") else f"var(--{colour})"


_WRITE: dict[type, Callable[[Any], str]] = {Rect: _rect, Dot: _dot, Text: _text}
