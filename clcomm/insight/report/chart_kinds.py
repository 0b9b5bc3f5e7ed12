"""The kinds of charts in a report, in seconds, bytes and shares, and their drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from clcomm.base.units import format_number, format_size
from clcomm.insight.drawing.scene import (
    BESIDE,
    CHARACTER,
    DASHED,
    LINE,
    NARROWEST,
    Axis,
    Dot,
    Key,
    Mark,
    Path,
    Rect,
    Scale,
    Scene,
    Text,
    count_text,
    even_ticks,
    level,
    line_key,
    log_axes,
    log_ticks,
    paint_key,
    painted,
    plot,
    text_on,
    text_width,
    time_text,
    upright,
)
from clcomm.insight.report.elements import MOST_SHOWN, paint_of

TIME, SIZE, CALLS = "time of an all-reduce", "size of an all-reduce", "calls"
#: Pixels: where a plot begins below its texts and ends, a panel of curves, a bar, and its row.
_TOP, _BOTTOM, _PANEL, _BAR, _ROW = 56, 220, 112, 20, 26
#: A part of a bar shows its value if it takes this share of the row for each character of the value.
_SHARE_A_CHARACTER = 0.05
#: The smallest share of a timeline's width for a stretch; less would be invisible.
_LEAST_SHARE = 0.0004
#: Curves with at most this many points have dots; one whose values span more than this has a logarithmic axis.
_DOTS, _WIDE_SPAN = 30, 20.0


@dataclass(frozen=True)
class Bars:
    """Horizontal stacked bars; values[i][j] is part j of bar i, in `unit`; `mark` is the (name, value) of a line."""

    title: str
    parts: Sequence[str]
    bars: Sequence[str]
    values: Sequence[Sequence[float]]
    unit: str
    note: str = ""
    mark: tuple[str, float] | None = None

    @property
    def longest(self) -> float:
        """The value at the right end: the longest bar or the mark."""
        return max([*map(sum, self.values), self.mark[1] if self.mark else 0.0]) or 1.0

    def scene(self) -> Scene:
        """A row for each bar: its name, its parts, with values where there is room, and its length."""
        rows = list(zip(self.bars, self.values, strict=True))[:MOST_SHOWN]
        ends = [f"{_number(sum(values))} {self.unit}" for _, values in rows]
        left, right = max(map(text_width, self.bars)) + 8, max(map(text_width, ends)) + 8
        marks: list[Mark] = []
        for row, ((name, values), end) in enumerate(zip(rows, ends, strict=True)):
            y, at = float(_ROW * row), 0.0
            marks += _row(name, y, left)
            for part, value in zip(self.parts, values, strict=True):
                if value > 0:
                    marks += self._piece(f"{name}, {part}", at, y, value, part)
                    at += value / self.longest
            if self.mark:
                marks.append(upright(self.mark[1] / self.longest, y, y + _BAR, "ink", 2.0))
            marks.append(Text(1.0, y + 14, end, shift=8.0, colour="ink"))
        return Scene(self.title, _ROW * len(rows) - _ROW + _BAR, marks, left, right, self._keys(), self.note)

    def _piece(self, name: str, x: float, y: float, value: float, part: str) -> list[Mark]:
        share, paint, number = value / self.longest, paint_of(part), _number(value)
        marks = painted(x, y, share, _BAR, paint, f"{name}: {value:.3f} {self.unit}")
        if len(self.parts) > 1:
            marks.append(upright(x + share, y, y + _BAR, "card"))
            if share > _SHARE_A_CHARACTER * len(number):
                marks.append(text_on(paint, x + share / 2, y + 14, number))
        return marks

    def _keys(self) -> list[Key]:
        keys = []
        if len(self.parts) > 1:
            shares = [""] * len(self.parts)
            if len(self.bars) == 1:
                shares = [f"{_number(value)} {self.unit}, {value / self.longest:.1%}" for value in self.values[0]]
            keys = [paint_key(paint_of(part), part, share) for part, share in zip(self.parts, shares, strict=True)]
        if self.mark:
            name, value = self.mark
            keys.append(line_key(f"{name}: {_number(value)} {self.unit}"))
        if len(self.bars) > MOST_SHOWN:
            keys.append(Key((), f"{MOST_SHOWN} of {len(self.bars)} shown"))
        return keys


def _row(name: str, y: float, left: float) -> list[Mark]:
    return [Text(0.0, y + 14, name, shift=-left, colour="ink"), Rect(0.0, y, 1.0, _BAR, "line", opacity=0.45)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


class Stretch(NamedTuple):
    """A stretch of a timeline's row from `begin_ms` to `end_ms`; `bucket` is -1 for none."""

    row: int
    part: str
    bucket: int
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """A row for each rank, filled with consecutive `stretches`.

    `behind` are stretches of hidden communication; `steps` are the (row, ms) at which steps began.
    """

    title: str
    rows: Sequence[str]
    parts: Sequence[str]
    stretches: Sequence[Stretch]
    behind: Sequence[Stretch]
    steps: Sequence[tuple[int, float]]
    end_ms: float
    note: str = ""

    def scene(self) -> Scene:
        """A row for each rank, hidden communication as a thin line below it, and a time axis."""
        row = 34 if self.behind else _ROW
        marks: list[Mark] = []
        for number, name in enumerate(self.rows):
            marks += _row(name, row * number, BESIDE[0])
            if self.behind:
                marks.append(Rect(0.0, row * number + _BAR + 3, 1.0, 5.0, "line", opacity=0.45))
        for each in self.stretches:
            marks += self._stretch(each, row * each.row, _BAR)
        for each in self.behind:
            marks += self._stretch(each, row * each.row + _BAR + 3, 5)
        marks += [upright(ms / self.end_ms, row * at, row * at + _BAR, "ink", 2.0) for at, ms in self.steps]
        axis = Axis(Scale(0.0, self.end_ms), even_ticks(0.0, self.end_ms, 7), format_number, self.note)
        keys = [*(paint_key(paint_of(part), part) for part in self.parts), line_key("a step begins")]
        return replace(plot(self.title, marks, axis, row * len(self.rows)), keys=keys, wide=True)

    def _stretch(self, each: Stretch, y: float, height: float) -> list[Mark]:
        share = max(_LEAST_SHARE, (each.end_ms - each.begin_ms) / self.end_ms)
        bucket = f", bucket {each.bucket}" if each.bucket >= 0 else ""
        length = format_number(each.end_ms - each.begin_ms)
        note = f"{self.rows[each.row]}, {each.part}{bucket}: {length} ms from {each.begin_ms:.3f}"
        return painted(each.begin_ms / self.end_ms, y, share, height, paint_of(each.part), note)


@dataclass(frozen=True)
class Distribution:
    """A histogram of calls: `counts[i]` took between `edges_s[i]` and `edges_s[i + 1]`; `marks` are percentiles."""

    title: str
    edges_s: Sequence[float]
    counts: Sequence[int]
    marks: Sequence[tuple[str, float]]
    note: str = ""

    def scene(self) -> Scene:
        """The counts as columns over a logarithmic time axis, with the percentiles as lines."""
        low, high, most = self.edges_s[0], self.edges_s[-1], max(self.counts)
        x = Scale(low, high, logarithmic=True)
        y = Axis(Scale(0.0, most, _BOTTOM, _TOP), [0, most], count_text, CALLS)
        marks = y.at_left()
        for left, right, count in zip(self.edges_s[:-1], self.edges_s[1:], self.counts, strict=True):
            if count:
                top, width = min(y.scale(count), _BOTTOM - 1.0), (x(right) - x(left)) * 0.94
                note = f"{time_text(left)} to {time_text(right)}: {count:,} calls"
                marks.append(Rect(x(left), top, width, _BOTTOM - top, "measured", note))
        names = []
        for row, (name, seconds) in enumerate(self.marks):
            at, height = x(min(max(seconds, low), high)), 12.0 + LINE * row
            anchor, shift = ("end", -4.0) if at > 0.5 else ("start", 4.0)
            marks.append(upright(at, height - 10, _BOTTOM, "beside", 1.5, DASHED))
            names.append(Text(at, height, f"{name} {time_text(seconds)}", anchor, shift))
        marks += names  # drawn last, so that no line crosses a name
        return plot(self.title, marks, Axis(x, log_ticks(low, high), time_text, TIME), _BOTTOM, self.note)


@dataclass(frozen=True)
class Points:
    """Measured (bytes, seconds) and the line fitted to them."""

    title: str
    points: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]]
    note: str = ""

    def scene(self) -> Scene:
        """Measured times by size and the fitted line, both axes logarithmic."""
        x, y = log_axes([*self.points, *self.line], _BOTTOM, (SIZE, TIME), time_text)
        marks = y.at_left()
        marks.append(Path([(x.scale(nbytes), y.scale(seconds)) for nbytes, seconds in self.line], "beside", 2.0))
        marks += [
            Dot(x.scale(nbytes), y.scale(seconds), 5.0, "measured", f"{format_size(nbytes)}: {time_text(seconds)}")
            for nbytes, seconds in self.points
        ]
        return plot(self.title, marks, x, _BOTTOM, self.note)


class Curve(NamedTuple):
    """A curve's values in order; None where a value is not known."""

    name: str
    values: Sequence[float | None]

    def marks(self, steps: Sequence[float], x: Scale, top: float) -> list[Mark]:
        """Return the curve with its axis at the left, between `top` and _PANEL pixels below."""
        known = [value for value in self.values if value is not None]
        if not known:
            return [Text(0.0, top + 13, f"{self.name}: not known", shift=-BESIDE[0])]
        low, high = min(known), max(known)
        logarithmic = low > 0 and high > _WIDE_SPAN * low
        if not logarithmic:
            low = min(0.0, low)
            high = high or 1.0
        ticks = log_ticks(low, high, 7) if logarithmic else even_ticks(low, high, 3)
        name = f"{self.name}{', log scale' if logarithmic else ''}"
        y = Axis(Scale(low, high, top + _PANEL - 8, top + 28, logarithmic=logarithmic), ticks, format_number, name)
        marks = y.at_left(top)
        for _, run in groupby(zip(steps, self.values, strict=True), lambda point: point[1] is not None):
            points = [(x(step), y.scale(value)) for step, value in run if value is not None]
            marks += [Path(points, "measured", 1.5)] if len(points) > 1 else []
            if len(steps) <= _DOTS or len(points) == 1:
                marks += [Dot(*point, 2.5, "measured") for point in points]
        return marks


@dataclass(frozen=True)
class Curves:
    """Curves over the same steps, each with its own axis; value i is at `steps[i]`."""

    title: str
    steps: Sequence[float]
    curves: Sequence[Curve]
    note: str = ""

    def scene(self) -> Scene:
        """The curves, one below another, over one axis of steps."""
        first, last = self.steps[0], self.steps[-1]
        ticks = [tick for tick in even_ticks(first, last, 6) if tick == int(tick)]
        x = Axis(Scale(first, last), ticks or [first], lambda step: f"{step:,.0f}", "step")
        marks = [
            mark
            for number, curve in enumerate(self.curves)
            for mark in curve.marks(self.steps, x.scale, number * _PANEL)
        ]
        return plot(self.title, marks, x, len(self.curves) * _PANEL, self.note)


@dataclass(frozen=True)
class Intervals:
    """Medians with their 95% intervals: (name, median, low, high); low and high are None without an interval."""

    title: str
    points: Sequence[tuple[str, float, float | None, float | None]]
    unit: str
    note: str = ""

    def scene(self) -> Scene:
        """Medians as points and intervals as lines, a row each, over an axis that begins at 0."""
        high = max(value for _, *values in self.points for value in values if value is not None) or 1.0
        x = Axis(Scale(0.0, high * 1.02), even_ticks(0.0, high, 5), format_number, self.unit)
        marks: list[Mark] = []
        for row, (name, median, low, up) in enumerate(self.points):
            y = 40.0 * row + 14
            around = "" if low is None or up is None else f" ({format_number(low)} to {format_number(up)})"
            marks.append(Text(0.0, y, _shortened(f"{name}: {format_number(median)} {self.unit}{around}")))
            if low is not None and up is not None:
                marks.append(level(x.scale(low), x.scale(up), y + 13, "measured", 3.0))
            marks.append(Dot(x.scale(median), y + 13, 5.0, "measured"))
        return plot(self.title, marks, x, 40.0 * len(self.points) + 4, self.note, left=8.0)


def _shortened(text: str) -> str:
    """Return the text, cut at its start if it is wider than a chart: paths differ at their ends."""
    most = int((NARROWEST + sum(BESIDE) - 8) / CHARACTER)
    return text if len(text) <= most else f"…{text[1 - most :]}"


Chart = Bars | Distribution | Points | Timeline | Curves | Intervals
