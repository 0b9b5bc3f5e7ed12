"""Charts with axes as SVG, drawn to be legible from 360 to 700 pixels wide; colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from clcomm.report.axes import CALLS, SIZE, TIME, log_ticks, size_text, size_ticks, time_text
from clcomm.report.shapes import Distribution, Points

WIDTH, HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 48, 50


class _Scale:
    """Places values of a logarithmic axis between two pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float):
        high = max(high, low * 1.0001)
        self._low, self._per = math.log(low), (end - begin) / (math.log(high) - math.log(low))
        self._begin = begin

    def __call__(self, value: float) -> float:
        return round(self._begin + (math.log(value) - self._low) * self._per, 1)


def distribution(chart: Distribution) -> str:
    """Return the counts as columns over a logarithmic axis of time, with the percentiles as lines."""
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
    for row, (name, seconds) in enumerate(chart.marks):
        at, y = x(min(max(seconds, low), high)), 12 + 13 * row
        anchor, shift = ("end", -4) if at > WIDTH / 2 else ("start", 4)
        parts.append(f'<line x1="{at}" y1="{y - 8}" x2="{at}" y2="{bottom}" class="mark"/>')
        parts.append(_text(at + shift, y, f"{name} {time_text(seconds)}", anchor))
    parts += _bottom_axis(x, log_ticks(low, high), time_text, TIME)
    parts.append(_text(_LEFT - 6, _TOP - 14, CALLS, "end"))
    parts += [_text(_LEFT - 6, _TOP + 4, f"{most:,}", "end"), _text(_LEFT - 6, bottom, "0", "end")]
    return _svg(chart.title, parts)


def points(chart: Points) -> str:
    """Return measured times by size and the fitted line, both axes logarithmic."""
    sizes = [nbytes for nbytes, _ in [*chart.points, *chart.line]]
    times = [seconds for _, seconds in [*chart.points, *chart.line]]
    low_s, high_s = min(times) / 1.3, max(times) * 1.3
    x = _Scale(min(sizes) / 1.3, max(sizes) * 1.3, _LEFT, WIDTH - _RIGHT)
    y = _Scale(low_s, high_s, HEIGHT - _BOTTOM, 28)
    path = " ".join(f"{x(nbytes)},{y(seconds)}" for nbytes, seconds in chart.line)
    parts = [f'<polyline points="{path}" class="fitted"/>']
    for nbytes, seconds in chart.points:
        title = escape(f"{size_text(nbytes)}: {time_text(seconds)}")
        parts.append(f'<circle cx="{x(nbytes)}" cy="{y(seconds)}" r="5" class="point"><title>{title}</title></circle>')
    for tick in log_ticks(low_s, high_s, 5):
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick)}" y2="{y(tick)}" class="grid"/>')
        parts.append(_text(_LEFT - 6, y(tick) + 4, time_text(tick), "end"))
    parts.append(_text(2, 14, TIME, "start"))
    parts += _bottom_axis(x, size_ticks(min(sizes), max(sizes), 5), size_text, SIZE)
    return _svg(chart.title, parts)


def _bottom_axis(x: _Scale, ticks: Sequence[float], write: Callable[[float], str], name: str) -> list[str]:
    bottom = HEIGHT - _BOTTOM
    parts = [f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" class="axis"/>']
    for tick in ticks:
        parts.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{bottom}" y2="{bottom + 4}" class="axis"/>')
        anchor = "end" if x(tick) > WIDTH - 40 else "middle"
        parts.append(_text(x(tick), bottom + 18, write(tick), anchor))
    return [*parts, _text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 40, name, "middle")]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, parts: Sequence[str]) -> str:
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
