"""Small drawings in pixels as SVG: marks and text in a page's own colours, which a file replaces by its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clcomm.insight.drawing.scene import CHARACTER, Mark, Path, Rect, Text
from clcomm.insight.drawing.svg import as_file

#: Okabe and Ito's, as in reports; each has a contrast of 3 to 1 and more with white and with Furo's dark background.
BLUE, VERMILLION, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#b05a8a", "#7f868d"
FONT, LINE = 13, 18
_STYLE = (
    "svg{--ink:#222;--soft:#222;--line:#7f868d;font-family:sans-serif}text{fill:var(--soft);stroke-width:0}"
    "@media(prefers-color-scheme:dark){svg{--ink:#ddd;--soft:#ddd}}"
)


def line(x1: float, y1: float, x2: float, y2: float, dash: tuple[float, ...] = ()) -> Path:
    """Return an axis or a line beside it."""
    return Path([(x1, y1), (x2, y2)], "line", 1.0, dash)


def legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> list[Mark]:
    marks: list[Mark] = []
    for name, colour in entries:
        marks += [Rect(x, y - 10, 12, 12, colour), Text(x + 17, y, name)]
        x += 17 + CHARACTER * len(name) + 22
    return marks


def svg(width: float, height: float, marks: Iterable[Mark]) -> str:
    """Return a drawing of a size in pixels, which it may be scaled down from."""
    return as_file([_in_shares(mark, width) for mark in marks], width, height, _STYLE)


def _in_shares(mark: Mark, width: float) -> Mark:
    if isinstance(mark, Path):
        return mark._replace(points=[(x / width, y) for x, y in mark.points])
    if isinstance(mark, Rect):
        return mark._replace(x=mark.x / width, width=max(mark.width, 0.5) / width)
    return mark._replace(x=mark.x / width)
