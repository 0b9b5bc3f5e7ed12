"""The elements of a drawing: rectangles, paths, dots and texts, in Okabe and Ito's colours, legible to all readers.

Horizontal places are shares of the plot, from 0 at its left end to 1, so that a drawing fills any width; vertical ones,
and those beside the plot, are pixels. Colours are #rrggbb or a role in ROLES, coloured by the reader's theme.
M. Okabe, K. Ito, Color Universal Design, 2008.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE, GREY = "#0072b2", "#d55e00", "#cc79a7", "#cccccc"
OKABE_ITO = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, "#000000")
#: The size of texts and the largest mean width of their characters, in pixels.
FONT, CHARACTER = 13, 7.8
#: Each role's colour on a light background.
ROLES = {
    "ink": "#1c2126", "soft": "#5a6570", "line": "#dfe3e7", "card": "#ffffff", "measured": BLUE, "beside": VERMILLION,
}  # fmt: skip
DASHED = (4.0, 3.0)
#: The distance of a paint's stripes, and the thickness of one, in pixels.
_STRIPES, _STRIPE = 6, 3
#: The height and width of a key's sample.
SAMPLE = 11


class Paint(NamedTuple):
    """A colour, plain or with stripes of a lighter one."""

    colour: str
    striped: bool = False


def stripe_of(paint: Paint) -> str:
    """Return the colour of a paint's stripes: halfway to white."""
    red, green, blue = (int(paint.colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"#{(red + 255) // 2:02x}{(green + 255) // 2:02x}{(blue + 255) // 2:02x}"


def ink_on(paint: Paint) -> str:
    """Return black or white, the more legible one on a paint."""
    return "#000000" if paint.striped or luminance(paint.colour) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Return a colour's relative luminance, 0 to 1 (WCAG 2.2)."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


class Rect(NamedTuple):
    """A filled rectangle; readers of a page see the note when they point at it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    note: str = ""
    opacity: float = 1.0


class Path(NamedTuple):
    """A line through points, or with `fill` the area that it encloses."""

    points: Sequence[tuple[float, float]]
    colour: str = ""
    width: float = 1.0
    dash: tuple[float, ...] = ()
    fill: str = ""
    opacity: float = 1.0


class Dot(NamedTuple):
    """A filled circle."""

    x: float
    y: float
    radius: float
    colour: str
    note: str = ""


class Text(NamedTuple):
    """A line of text, moved `shift` pixels to the right; `halo` surrounds it, so that no line crosses it."""

    x: float
    y: float
    words: str
    anchor: str = "start"
    shift: float = 0.0
    colour: str = "soft"
    halo: str = "card"
    bold: bool = False


Mark = Rect | Path | Dot | Text


class Key(NamedTuple):
    """An entry of a legend: a sample of SAMPLE pixels, a name, and its value if it has one."""

    sample: Sequence[Mark]
    name: str
    value: str = ""


@dataclass(frozen=True)
class Scene:
    """A drawing with its title, legend and note; `left` and `right` are the pixels beside the plot for texts.

    A wide one deserves a page's whole width.
    """

    title: str
    height: float
    marks: Sequence[Mark]
    left: float = 0.0
    right: float = 0.0
    keys: Sequence[Key] = ()
    note: str = ""
    wide: bool = False


def text_width(words: str) -> float:
    """Return a text's largest width in pixels."""
    return CHARACTER * len(words)


def upright(x: float, top: float, bottom: float, colour: str, width: float = 1.0, dash: tuple[float, ...] = ()) -> Path:
    return Path([(x, top), (x, bottom)], colour, width, dash)


def level(left: float, right: float, y: float, colour: str, width: float = 1.0) -> Path:
    return Path([(left, y), (right, y)], colour, width)


def arrow(
    begin: tuple[float, float], end: tuple[float, float], colour: str, room: float, dash: tuple[float, ...] = ()
) -> list[Mark]:
    """Return a line with a head at its end, in a plot of `room` pixels."""
    across, down = room * (end[0] - begin[0]), end[1] - begin[1]
    along, side = 8 / (math.hypot(across, down) or 1.0), 3.5 / (math.hypot(across, down) or 1.0)
    foot = end[0] - along * across / room, end[1] - along * down
    wing = side * down / room, side * across
    head = [end, (foot[0] + wing[0], foot[1] - wing[1]), (foot[0] - wing[0], foot[1] + wing[1])]
    return [Path([begin, foot], colour, 1.5, dash), Path(head, fill=colour)]


def painted(x: float, y: float, width: float, height: float, paint: Paint, note: str = "") -> list[Mark]:
    """Return a rectangle in a paint, with its stripes if it has some."""
    stripes = range(_STRIPE, round(height) - 1, _STRIPES) if paint.striped else ()
    return [
        Rect(x, y, width, height, paint.colour, note),
        *(Rect(x, y + at, width, min(_STRIPE, height - at), stripe_of(paint)) for at in stripes),
    ]


def text_on(paint: Paint, x: float, y: float, words: str) -> Text:
    """Return a centred text that is legible on a paint."""
    return Text(x, y, words, "middle", 0.0, ink_on(paint), stripe_of(paint) if paint.striped else paint.colour)


def paint_key(paint: Paint, name: str, value: str = "") -> Key:
    return Key(painted(0.0, 0.0, 1.0, SAMPLE, paint), name, value)


def line_key(name: str) -> Key:
    return Key([upright(0.5, 0.0, SAMPLE, "ink", 2.0)], name)
