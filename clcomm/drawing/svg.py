"""A scene as SVG within a page: it fills the available width, and its texts keep their size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from clcomm.drawing.scene import FONT, SAMPLE, Dot, Mark, Path, Rect, Scene, Text

#: The units of a path's width; SVG has shares of the width for all marks but these.
_ACROSS = 1000


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
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" font-size="{FONT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{_marks(marks, height)}</svg>\n'


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
