"""The elements of a drawing: rectangles, paths, dots and texts, in Okabe and Ito's colours, legible to all readers.

Horizontal places are shares of the plot, from 0 at its left end to 1, so that a drawing fills any width; vertical ones,
and those beside the plot, are pixels. Colours are #rrggbb or a role in ROLES, coloured by the reader's theme.
M. Okabe, K. Ito, Color Universal Design, 2008.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clcomm.base.units import format_size

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


# --- Axes of charts: scales, ticks and labels. ---

#: The narrowest plot, in pixels, in which labels have to fit beside each other.
NARROWEST = 230.0
#: The pixels from one label to the next, and those beside a plot for labels.
LINE, BESIDE = 18, (66.0, 30.0)
#: The fewest ticks from which an axis can be read.
_FEWEST_TICKS = 3
#: The units of counts and of times, largest first, and their factors.
_COUNT_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_TIME_UNITS = ((1.0, " s"), (1e-3, " ms"), (1e-6, " us"), (1e-9, " ns"))
#: Counts below this are shown with all their digits.
_FULL_COUNTS = 10**4


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`, both above 0: 1, 2 and 5 times powers of ten.

    If these are too many, 1 and 3 times powers of ten, then powers of ten alone, then every n-th of them; if they are
    fewer than three, multiples of a round number.
    """
    for steps in ((1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(ticks) <= most:
            return ticks if len(ticks) >= _FEWEST_TICKS else even_ticks(low, high, most)
    return ticks[:: -(-len(ticks) // most)]


def size_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` powers of two from `low` to `high` bytes; if fewer than three, multiples of one."""
    exponents = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    ticks = [float(1 << exponent) for exponent in exponents if exponent >= 0]
    if len(ticks) < _FEWEST_TICKS and high > low:
        step = 2.0 ** max(0, math.ceil(math.log2((high - low) / (most - 1))))
        return _multiples(step, low, high)
    return ticks[:: max(1, -(-len(ticks) // most))]


def _multiples(step: float, low: float, high: float) -> list[float]:
    return [step * count for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def even_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return two to `most` multiples of 1, 2, 2.5 or 5 times a power of ten; [low] for an empty range."""
    least_step = (high - low) / (most - 1)
    if least_step <= 1e-9 * abs(low):
        return [low]
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least_step * (1 - 1e-9))
    return _multiples(step, low, high)


def count_text(number: float) -> str:
    """Return a count below 10^16 in at most six characters."""
    return f"{number:,.0f}" if number < _FULL_COUNTS else _in_unit(number, _COUNT_UNITS)


def time_text(seconds: float) -> str:
    """Return a time in a suitable unit, with three digits, or more from 1,000 s up; in whole ps below 1 ns."""
    return _in_unit(seconds, _TIME_UNITS)


def _in_unit(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Return a value, at least 0, in the largest unit in which it is at least 1 once rounded to three digits."""
    rounded = float(f"{value:.3g}")
    factor, unit = next((each for each in units if rounded >= each[0]), units[-1])
    if rounded >= 1000 * factor:
        return f"{value / factor:,.0f}{unit}"
    # The smallest unit has no other below it: three decimal places instead of an exponent.
    return f"{rounded / factor if rounded >= factor else round(rounded / factor, 3):.3g}{unit}"


class Scale:
    """Maps values from `low` to `high` to places from `begin` to `end`."""

    def __init__(self, low: float, high: float, begin: float = 0.0, end: float = 1.0, *, logarithmic: bool = False):
        self._of: Callable[[float], float] = math.log if logarithmic else float
        if self._of(high) - self._of(low) < 1e-4:
            high = high * 1.0001 if logarithmic else high + 1.0
        self._low = self._of(low)
        self._per, self._begin = (end - begin) / (self._of(high) - self._low), begin

    def __call__(self, value: float) -> float:
        return self._begin + (self._of(value) - self._low) * self._per


class Axis(NamedTuple):
    """A scale with its ticks, their labels, and the axis's name."""

    scale: Scale
    ticks: Sequence[float]
    write: Callable[[float], str]
    name: str

    def at_left(self, top: float = 0.0) -> list[Mark]:
        """Return a vertical axis: its name at `top`, lines across the plot, and the labels that fit beside it."""
        marks: list[Mark] = [Text(0.0, top + 13, self.name, shift=-BESIDE[0])]
        taken = math.inf
        for tick in self.ticks:
            y = self.scale(tick)
            marks.append(level(0.0, 1.0, y, "line"))
            if y <= taken - LINE:
                marks.append(Text(0.0, y + 4, self.write(tick), "end", -6.0))
                taken = y
        return marks


def log_axes(
    points: Sequence[tuple[float, float]],
    bottom: float,
    names: tuple[str, str],
    write: Callable[[float], str],
    most: int = 5,
) -> tuple[Axis, Axis]:
    """Return logarithmic axes with a margin around points of (bytes, value).

    Args:
        bottom: the end of the plot, in pixels.
        write: returns a value as text.
        most: the most ticks of an axis.
    """
    sizes, values = zip(*points, strict=True)
    low, high = min(values) / 1.3, max(values) * 1.3
    across = Scale(min(sizes) / 1.3, max(sizes) * 1.3, logarithmic=True)
    return (
        Axis(across, size_ticks(min(sizes), max(sizes), most), format_size, names[0]),
        Axis(Scale(low, high, bottom, 28.0, logarithmic=True), log_ticks(low, high, most), write, names[1]),
    )


def plot(
    title: str,
    marks: Sequence[Mark],
    x: Axis,
    bottom: float,
    note: str = "",
    *,
    left: float = BESIDE[0],
    room: float = NARROWEST,
) -> Scene:
    """Return a scene of marks above a horizontal axis, which has the labels that fit into a plot of `room` pixels."""
    axis: list[Mark] = [level(0.0, 1.0, bottom, "soft"), Text(0.5, bottom + 38, x.name, "middle")]
    taken = -math.inf
    for tick in x.ticks:
        place, half = x.scale(tick), text_width(x.write(tick)) / 2
        axis.append(upright(place, bottom, bottom + 4, "soft"))
        if room * place - half >= taken:
            axis.append(Text(place, bottom + 18, x.write(tick), "middle"))
            taken = room * place + half + CHARACTER
    return Scene(title, bottom + 46, [*marks, *axis], left, BESIDE[1], note=note)
