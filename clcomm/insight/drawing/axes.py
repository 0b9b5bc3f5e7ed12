"""Axes of charts: scales, ticks and labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from clcomm.base.units import format_size
from clcomm.insight.drawing.scene import CHARACTER, Mark, Scene, Text, level, text_width, upright

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
