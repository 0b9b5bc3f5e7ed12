"""The charts of a report as scenes, one function for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clcomm.drawing.axes import (
    BELOW,
    BESIDE,
    LINE,
    NARROWEST,
    Axis,
    Scale,
    count_text,
    even_ticks,
    frame,
    log_axes,
    log_ticks,
    size_text,
    time_text,
)
from clcomm.drawing.scene import (
    CHARACTER,
    DASHED,
    Dot,
    Key,
    Mark,
    Path,
    Rect,
    Scene,
    Text,
    level,
    line_key,
    paint_key,
    painted,
    text_on,
    text_width,
    upright,
)
from clcomm.report.colours import paint_of
from clcomm.report.elements import (
    MOST_SHOWN,
    Bars,
    Chart,
    Curve,
    Curves,
    Distribution,
    Intervals,
    Points,
    Stretch,
    Timeline,
)
from clcomm.units import format_number

TIME, SIZE, CALLS = "time of an all-reduce", "size of an all-reduce", "calls"
#: Pixels: where a plot begins below its texts and ends, a panel of curves, a bar, and its row.
_TOP, _BOTTOM, _PANEL, _BAR, _ROW = 56, 220, 112, 20, 26
#: A part of a bar shows its value if it takes this share of the row for each character of the value.
_SHARE_A_CHARACTER = 0.05
#: The smallest share of a timeline's width for a stretch; less would be invisible.
_LEAST_SHARE = 0.0004
#: Curves with at most this many points have dots; one whose values span more than this has a logarithmic axis.
_DOTS, _WIDE_SPAN = 30, 20.0


def scene_of(chart: Chart) -> Scene:
    """Return a chart as a scene."""
    return _DRAW[type(chart)](chart)


def _bars(chart: Bars) -> Scene:
    """A row for each bar: its name, its parts, with values where there is room, and its length."""
    rows = list(zip(chart.bars, chart.values, strict=True))[:MOST_SHOWN]
    ends = [f"{_number(sum(values))} {chart.unit}" for _, values in rows]
    left, right = max(map(text_width, chart.bars)) + 8, max(map(text_width, ends)) + 8
    marks: list[Mark] = []
    for row, ((name, values), end) in enumerate(zip(rows, ends, strict=True)):
        y, at = float(_ROW * row), 0.0
        marks += [Text(0.0, y + 14, name, shift=-left, colour="ink"), Rect(0.0, y, 1.0, _BAR, "line", opacity=0.45)]
        for part, value in zip(chart.parts, values, strict=True):
            if value > 0:
                marks += _piece(chart, f"{name}, {part}", at, y, value, part)
                at += value / chart.longest
        if chart.mark:
            marks.append(upright(chart.mark[1] / chart.longest, y, y + _BAR, "ink", 2.0))
        marks.append(Text(1.0, y + 14, end, shift=8.0, colour="ink"))
    return Scene(chart.title, _ROW * len(rows) - _ROW + _BAR, marks, left, right, _bar_keys(chart), chart.note)


def _piece(chart: Bars, name: str, x: float, y: float, value: float, part: str) -> list[Mark]:
    share, paint, number = value / chart.longest, paint_of(part), _number(value)
    marks = painted(x, y, share, _BAR, paint, f"{name}: {value:.3f} {chart.unit}")
    if len(chart.parts) > 1:
        marks.append(upright(x + share, y, y + _BAR, "card"))
        if share > _SHARE_A_CHARACTER * len(number):
            marks.append(text_on(paint, x + share / 2, y + 14, number))
    return marks


def _bar_keys(chart: Bars) -> list[Key]:
    keys = []
    if len(chart.parts) > 1:
        shares = [""] * len(chart.parts)
        if len(chart.bars) == 1:
            shares = [f"{_number(value)} {chart.unit}, {value / chart.longest:.1%}" for value in chart.values[0]]
        keys = [paint_key(paint_of(part), part, share) for part, share in zip(chart.parts, shares, strict=True)]
    if chart.mark:
        name, value = chart.mark
        keys.append(line_key("ink", f"{name}: {_number(value)} {chart.unit}"))
    if len(chart.bars) > MOST_SHOWN:
        keys.append(Key((), f"{MOST_SHOWN} of {len(chart.bars)} shown"))
    return keys


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _timeline(chart: Timeline) -> Scene:
    """A row for each rank, hidden communication as a thin line below it, and a time axis."""
    row = 34 if chart.behind else _ROW
    marks: list[Mark] = []
    for number, name in enumerate(chart.rows):
        y = row * number
        marks += [Text(0.0, y + 14, name, shift=-BESIDE[0], colour="ink"), Rect(0, y, 1, _BAR, "line", opacity=0.45)]
        if chart.behind:
            marks.append(Rect(0, y + _BAR + 3, 1, 5, "line", opacity=0.45))
    for each in chart.stretches:
        marks += _stretch(chart, each, row * each.row, _BAR)
    for each in chart.behind:
        marks += _stretch(chart, each, row * each.row + _BAR + 3, 5)
    marks += [upright(ms / chart.end_ms, row * at, row * at + _BAR, "ink", 2.0) for at, ms in chart.steps]
    ticks = even_ticks(0.0, chart.end_ms, 7)
    axis = Axis(Scale(0.0, chart.end_ms), ticks, format_number, chart.note)
    bottom = row * len(chart.rows)
    keys = [*(paint_key(paint_of(part), part) for part in chart.parts), line_key("ink", "a step begins")]
    marks += axis.at_bottom(bottom)
    return Scene(chart.title, bottom + BELOW, marks, *BESIDE, keys, wide=True)


def _stretch(chart: Timeline, each: Stretch, y: float, height: float) -> list[Mark]:
    share = max(_LEAST_SHARE, (each.end_ms - each.begin_ms) / chart.end_ms)
    bucket = f", bucket {each.bucket}" if each.bucket >= 0 else ""
    length = format_number(each.end_ms - each.begin_ms)
    note = f"{chart.rows[each.row]}, {each.part}{bucket}: {length} ms from {each.begin_ms:.3f}"
    return painted(each.begin_ms / chart.end_ms, y, share, height, paint_of(each.part), note)


def _distribution(chart: Distribution) -> Scene:
    """The counts as columns over a logarithmic time axis, with the percentiles as lines."""
    low, high, most = chart.edges_s[0], chart.edges_s[-1], max(chart.counts)
    x, y = Scale(low, high, logarithmic=True), Scale(0.0, most, _BOTTOM, _TOP)
    marks: list[Mark] = []
    for left, right, count in zip(chart.edges_s[:-1], chart.edges_s[1:], chart.counts, strict=True):
        if count:
            top, note = min(y(count), _BOTTOM - 1.0), f"{time_text(left)} to {time_text(right)}: {count:,} calls"
            marks.append(Rect(x(left), top, (x(right) - x(left)) * 0.94, _BOTTOM - top, "measured", note))
    names = []
    for row, (name, seconds) in enumerate(chart.marks):
        at, height = x(min(max(seconds, low), high)), 12.0 + LINE * row
        anchor, shift = ("end", -4.0) if at > 0.5 else ("start", 4.0)
        marks.append(upright(at, height - 10, _BOTTOM, "beside", 1.5, DASHED))
        names.append(Text(at, height, f"{name} {time_text(seconds)}", anchor, shift))
    marks += names  # drawn last, so that no line crosses a name
    marks += Axis(x, log_ticks(low, high), time_text, TIME).at_bottom(_BOTTOM)
    marks += [Text(0.0, 12.0, CALLS, shift=-BESIDE[0]), Text(0.0, _TOP + 5.0, count_text(most), "end", -6.0)]
    return Scene(chart.title, _BOTTOM + BELOW, [*marks, Text(0.0, _BOTTOM, "0", "end", -6.0)], *BESIDE, (), chart.note)


def _points(chart: Points) -> Scene:
    """Measured times by size and the fitted line, both axes logarithmic."""
    sizes, times = zip(*chart.points, *chart.line, strict=True)
    x, y = log_axes(sizes, times, _BOTTOM, SIZE, TIME, time_text)
    marks = frame(x, y, _BOTTOM)
    marks.append(Path([(x.scale(nbytes), y.scale(seconds)) for nbytes, seconds in chart.line], "beside", 2.0))
    marks += [
        Dot(x.scale(nbytes), y.scale(seconds), 5.0, "measured", f"{size_text(nbytes)}: {time_text(seconds)}")
        for nbytes, seconds in chart.points
    ]
    return Scene(chart.title, _BOTTOM + BELOW, marks, *BESIDE, (), chart.note)


def _curves(chart: Curves) -> Scene:
    """The curves, one below another, over one axis of steps."""
    first, last = chart.steps[0], chart.steps[-1]
    ticks = [tick for tick in even_ticks(first, last, 6) if tick == int(tick)]
    x = Axis(Scale(first, last), ticks or [first], lambda step: f"{step:,.0f}", "step")
    marks = [
        mark
        for number, curve in enumerate(chart.curves)
        for mark in _curve(curve, chart.steps, x.scale, number * _PANEL)
    ]
    bottom = len(chart.curves) * _PANEL
    return Scene(chart.title, bottom + BELOW, [*marks, *x.at_bottom(bottom)], *BESIDE, (), chart.note)


def _curve(curve: Curve, steps: Sequence[float], x: Scale, top: float) -> list[Mark]:
    known = [value for value in curve.values if value is not None]
    if not known:
        return [Text(0.0, top + 14, f"{curve.name}: not known", shift=-BESIDE[0])]
    low, high = min(known), max(known)
    logarithmic = low > 0 and high > _WIDE_SPAN * low
    if not logarithmic:
        low = min(0.0, low)
        high = high or 1.0
    ticks = log_ticks(low, high, 7) if logarithmic else even_ticks(low, high, 3)
    name = f"{curve.name}{', log scale' if logarithmic else ''}"
    y = Axis(Scale(low, high, top + _PANEL - 8, top + 28, logarithmic=logarithmic), ticks, format_number, name)
    marks = [Text(0.0, top + 14, name, shift=-BESIDE[0]), *y.at_left()]
    for run in _runs(zip(steps, curve.values, strict=True)):
        points = [(x(step), y.scale(value)) for step, value in run]
        marks += [Path(points, "measured", 1.5)] if len(points) > 1 else []
        if len(steps) <= _DOTS or len(points) == 1:
            marks += [Dot(*point, 2.5, "measured") for point in points]
    return marks


def _runs(points: zip[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Return the unbroken stretches of a curve."""
    found: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            found.append([])
        else:
            found[-1].append((step, value))
    return [run for run in found if run]


def _intervals(chart: Intervals) -> Scene:
    """Medians as points and intervals as lines, a row each, over an axis that begins at 0."""
    high = max(value for _, *values in chart.points for value in values if value is not None) or 1.0
    x = Axis(Scale(0.0, high * 1.02), even_ticks(0.0, high, 5), format_number, chart.unit)
    marks: list[Mark] = []
    for row, (name, median, low, up) in enumerate(chart.points):
        y = 40.0 * row + 14
        around = "" if low is None or up is None else f" ({format_number(low)} to {format_number(up)})"
        marks.append(Text(0.0, y, _shortened(f"{name}: {format_number(median)} {chart.unit}{around}")))
        if low is not None and up is not None:
            marks.append(level(x.scale(low), x.scale(up), y + 13, "measured", 3.0))
        marks.append(Dot(x.scale(median), y + 13, 5.0, "measured"))
    bottom = 40.0 * len(chart.points) + 4
    return Scene(chart.title, bottom + BELOW, [*marks, *x.at_bottom(bottom)], 8.0, BESIDE[1], (), chart.note)


def _shortened(text: str) -> str:
    """Return the text, cut at its start if it is wider than a chart, as paths differ at their ends."""
    most = int((NARROWEST + sum(BESIDE) - 8) / CHARACTER)
    return text if len(text) <= most else f"…{text[1 - most :]}"


_DRAW: dict[type, Callable[[Any], Scene]] = {
    Bars: _bars, Timeline: _timeline, Distribution: _distribution, Points: _points, Curves: _curves,
    Intervals: _intervals,
}  # fmt: skip
