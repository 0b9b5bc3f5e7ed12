"""Charts with axes as SVG, legible at widths of 360 to 700 pixels, in the page's colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from clcomm.report.axes import (
    CALLS,
    SIZE,
    TIME,
    WIDE_SPAN,
    count_text,
    even_ticks,
    log_ticks,
    size_text,
    size_ticks,
    time_text,
)
from clcomm.report.elements import Curve, Curves, Distribution, Intervals, Points
from clcomm.units import format_number

WIDTH, HEIGHT = 480, 270
#: page.css's largest text, on narrow screens, and the approximate width of its characters.
FONT, CHARACTER = 16, 9.2
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 14, 66, 50
_LINE = 18
_CURVE_HEIGHT = 112
#: Curves with at most this many points have dots.
_DOTS = 30
#: Half the height of a row of `intervals`.
_ROW = 20


class _Scale:
    """Maps an axis's values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float, *, logarithmic: bool = True):
        self._of: Callable[[float], float] = math.log if logarithmic else float
        if self._of(high) - self._of(low) < 1e-4:
            high = high * 1.0001 if logarithmic else high + 1.0
        self._low = self._of(low)
        self._per, self._begin = (end - begin) / (self._of(high) - self._low), begin

    def __call__(self, value: float) -> float:
        return round(self._begin + (self._of(value) - self._low) * self._per, 1)


def text_width(text: str) -> float:
    """Return a text's largest width, which it has on a narrow screen, in the chart's units."""
    return CHARACTER * len(text)


def distribution(chart: Distribution) -> str:
    """Return the counts as columns over a logarithmic time axis, with the percentiles as lines."""
    low, high, most = chart.edges_s[0], chart.edges_s[-1], max(chart.counts)
    x, bottom = _Scale(low, high, _LEFT, WIDTH - _RIGHT), HEIGHT - _BOTTOM
    parts = []
    for left, right, count in zip(chart.edges_s[:-1], chart.edges_s[1:], chart.counts, strict=True):
        if count:
            height, width = max(1.0, (bottom - _TOP) * count / most), max(1.0, x(right) - x(left) - 1)
            title = escape(f"{time_text(left)} to {time_text(right)}: {count:,} calls")
            parts.append(
                f'<rect x="{x(left) + 0.5:.1f}" y="{bottom - height:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'class="column"><title>{title}</title></rect>'
            )
    names = []
    for row, (name, seconds) in enumerate(chart.marks):
        at, y = x(min(max(seconds, low), high)), 16 + _LINE * row
        anchor, shift = ("end", -4) if at > WIDTH / 2 else ("start", 4)
        parts.append(f'<line x1="{at}" y1="{y - 10}" x2="{at}" y2="{bottom}" class="mark"/>')
        names.append(_text(at + shift, y, f"{name} {time_text(seconds)}", anchor))
    parts += names  # drawn last, so that no line crosses a name
    parts += _bottom_axis(x, log_ticks(low, high), time_text, TIME, bottom)
    parts.append(_text(2, 16, CALLS, "start"))
    parts += [_text(_LEFT - 6, _TOP + 5, count_text(most), "end"), _text(_LEFT - 6, bottom, "0", "end")]
    return _svg(chart.title, parts)


def points(chart: Points) -> str:
    """Return measured times by size and the fitted line, both axes logarithmic."""
    sizes = [nbytes for nbytes, _ in [*chart.points, *chart.line]]
    times = [seconds for _, seconds in [*chart.points, *chart.line]]
    low_s, high_s = min(times) / 1.3, max(times) * 1.3
    x, bottom = _Scale(min(sizes) / 1.3, max(sizes) * 1.3, _LEFT, WIDTH - _RIGHT), HEIGHT - _BOTTOM
    y = _Scale(low_s, high_s, bottom, 32)
    path = " ".join(f"{x(nbytes)},{y(seconds)}" for nbytes, seconds in chart.line)
    parts = _left_axis(y, log_ticks(low_s, high_s, 5), time_text)
    parts.append(f'<polyline points="{path}" class="fitted"/>')
    for nbytes, seconds in chart.points:
        title = escape(f"{size_text(nbytes)}: {time_text(seconds)}")
        parts.append(f'<circle cx="{x(nbytes)}" cy="{y(seconds)}" r="5" class="point"><title>{title}</title></circle>')
    parts.append(_text(2, 14, TIME, "start"))
    parts += _bottom_axis(x, size_ticks(min(sizes), max(sizes), 5), size_text, SIZE, bottom)
    return _svg(chart.title, parts)


def curves(chart: Curves) -> str:
    """Return the curves, one below another, over one axis of steps."""
    first, last = chart.steps[0], chart.steps[-1]
    x = _Scale(first, last, _LEFT, WIDTH - _RIGHT, logarithmic=False)
    parts: list[str] = []
    for number, curve in enumerate(chart.curves):
        parts += _curve(curve, chart.steps, x, number * _CURVE_HEIGHT)
    bottom = len(chart.curves) * _CURVE_HEIGHT
    ticks = [tick for tick in even_ticks(first, last, 6) if tick == int(tick)]
    parts += _bottom_axis(x, ticks or [first], lambda step: f"{step:,.0f}", "step", bottom)
    return _svg(chart.title, parts, bottom + _BOTTOM)


def _curve(curve: Curve, steps: Sequence[float], x: _Scale, top: float) -> list[str]:
    known = [value for value in curve.values if value is not None]
    if not known:
        return [_text(2, top + 16, f"{curve.name}: not known", "start")]
    low, high = min(known), max(known)
    logarithmic = low > 0 and high > WIDE_SPAN * low
    if not logarithmic:
        low = min(0.0, low)
        high = high or 1.0
    y = _Scale(low, high, top + _CURVE_HEIGHT - 8, top + 30, logarithmic=logarithmic)
    ticks = log_ticks(low, high, 7) if logarithmic else even_ticks(low, high, 3)
    parts = [_text(2, top + 16, f"{curve.name}{', log scale' if logarithmic else ''}", "start")]
    parts += _left_axis(y, ticks, lambda value: format_number(value))
    for run in _runs(zip(steps, curve.values, strict=True)):
        path = " ".join(f"{x(step)},{y(value)}" for step, value in run)
        dots = "" if len(steps) > _DOTS and len(run) > 1 else "".join(
            f'<circle cx="{x(step)}" cy="{y(value)}" r="2.5" class="point"/>' for step, value in run
        )  # fmt: skip
        parts.append(f'<polyline points="{path}" class="curve"/>{dots}')
    return parts


def _runs(points: zip[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Return the unbroken stretches of a curve."""
    found: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            found.append([])
        else:
            found[-1].append((step, value))
    return [run for run in found if run]


def intervals(chart: Intervals) -> str:
    """Return medians as points and intervals as lines, a row each, over an axis that begins at 0."""
    names = [name for name, *_ in chart.points]
    high = max(value for _, *values in chart.points for value in values if value is not None) or 1.0
    left = 8.0
    x = _Scale(0.0, high * 1.02, left, WIDTH - 24, logarithmic=False)
    bottom = 8 + 2 * _ROW * len(names)
    parts = []
    for row, (name, median, low, up) in enumerate(chart.points):
        y = 8 + 2 * _ROW * row + _ROW
        around = "" if low is None or up is None else f" ({format_number(low)} to {format_number(up)})"
        parts.append(_text(left, y - 4, _shortened(f"{name}: {format_number(median)} {chart.unit}{around}"), "start"))
        if low is not None and up is not None:
            parts.append(f'<line x1="{x(low)}" x2="{x(up)}" y1="{y + 9}" y2="{y + 9}" class="interval"/>')
        parts.append(f'<circle cx="{x(median)}" cy="{y + 9}" r="5" class="point"/>')
    ticks = even_ticks(0.0, high, 5)
    parts += _bottom_axis(x, ticks, lambda value: format_number(value), chart.unit, bottom + 8, left)
    return _svg(chart.title, parts, bottom + 8 + _BOTTOM)


def _shortened(text: str) -> str:
    """Return the text, cut at its start if it is wider than a chart, as paths differ at their ends."""
    most = int((WIDTH - 16) / CHARACTER)
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _left_axis(y: _Scale, ticks: Sequence[float], write: Callable[[float], str]) -> list[str]:
    parts, taken = [], math.inf
    for tick in ticks:
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick)}" y2="{y(tick)}" class="grid"/>')
        if y(tick) <= taken - _LINE:
            parts.append(_text(_LEFT - 6, y(tick) + 4, write(tick), "end"))
            taken = y(tick)
    return parts


def _bottom_axis(
    x: _Scale, ticks: Sequence[float], write: Callable[[float], str], name: str, bottom: float, left: float = _LEFT
) -> list[str]:
    parts = [f'<line x1="{left}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" class="axis"/>']
    taken = 0.0
    for tick in ticks:
        parts.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{bottom}" y2="{bottom + 4}" class="axis"/>')
        half = text_width(write(tick)) / 2
        at = min(max(x(tick), half), WIDTH - half)
        if at - half >= taken:
            parts.append(_text(at, bottom + 19, write(tick), "middle"))
            taken = at + half + CHARACTER
    return [*parts, _text((left + WIDTH - _RIGHT) / 2, bottom + 41, name, "middle")]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
