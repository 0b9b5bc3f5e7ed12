"""Small drawings as SVG: shapes and text in a page's own colours, which a file replaces by its own."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

#: Okabe and Ito's, as in reports; each has a contrast of 3 to 1 and more with white and with Furo's dark background.
BLUE, VERMILLION, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#b05a8a", "#7f868d"
FONT, LINE, CHARACTER = 13, 18, 7.3
_STYLE = (
    "<style>svg{color:#222;font-family:sans-serif}text{fill:currentColor}.axis{stroke:currentColor;opacity:.45}"
    ".on-dark{fill:#fff}.on-light{fill:#000}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"
)


class Bar(NamedTuple):
    """A row of a chart of ratios: a name, and a median with its range for each series; None: not measured."""

    name: str
    values: Sequence[tuple[float, float, float] | None]


def text(x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False, kind: str = "") -> str:
    style = ' font-weight="bold"' if bold else ""
    style += f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{FONT}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, note: str = "", opacity: float = 1.0) -> str:
    inside = f"<title>{escape(note)}</title>" if note else ""
    faint = f' fill-opacity="{opacity:g}"' if opacity != 1 else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}"{faint}>{inside}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False, colour: str = "") -> str:
    style = ' stroke-dasharray="3 3"' if dashed else ""
    style += f' stroke="{colour}" stroke-width="2"' if colour else ' class="axis"'
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{style}/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a line with a head at its end, drawn as a small triangle; horizontal, vertical or neither."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5 or 1.0
    dx, dy = (x2 - x1) / length * 7, (y2 - y1) / length * 7
    head = (
        f"{x2:.1f},{y2:.1f} {x2 - dx + dy / 2:.1f},{y2 - dy - dx / 2:.1f} {x2 - dx - dy / 2:.1f},{y2 - dy + dx / 2:.1f}"
    )
    return line(x1, y1, x2 - dx, y2 - dy) + f'<polygon points="{head}" fill="currentColor"/>'


def legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> str:
    parts = []
    for name, colour in entries:
        parts += [rect(x, y - 10, 12, 12, colour), text(x + 17, y, name)]
        x += 17 + CHARACTER * len(name) + 22
    return "".join(parts)


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """Return a drawing of a size in pixels, which it may be scaled down from."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return head + _STYLE + "".join(parts) + "</svg>\n"
