"""Bars and timelines as HTML that fills the available width: lengths are percentages, texts keep their size."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from clcomm.report.axes import even_ticks
from clcomm.report.colours import class_of
from clcomm.report.elements import MOST_SHOWN, Bars, Stretch, Timeline
from clcomm.units import format_number

#: A part of a bar shows its value if it takes this share of the row for each character of the value.
_SHARE_A_CHARACTER = 0.045
#: The smallest share of a timeline's width for a stretch; less would be invisible.
_LEAST_SHARE = 0.0004


def bars(chart: Bars) -> str:
    """Return a row for each bar: its name, its parts, with values where there is room, and its length."""
    longest, single = chart.longest, len(chart.bars) == 1
    rows = []
    for name, values in list(zip(chart.bars, chart.values, strict=True))[:MOST_SHOWN]:
        pieces = "".join(
            _piece(name, part, value, longest, chart)
            for part, value in zip(chart.parts, values, strict=True)
            if value > 0
        )
        mark = f'<b style="left:{100 * chart.mark[1] / longest:.3f}%"></b>' if chart.mark else ""
        rows.append(
            f'<span>{escape(name)}</span><div class="bar">{pieces}{mark}</div>'
            f"<span>{_number(sum(values))} {chart.unit}</span>"
        )
    shares: Sequence[float | None] = chart.values[0] if single else [None] * len(chart.parts)
    legend = [
        f'<li><i class="{class_of(part)}"></i>{escape(part)}{_share(value, longest, chart.unit)}</li>'
        for part, value in zip(chart.parts, shares, strict=True)
        if len(chart.parts) > 1
    ]
    if chart.mark:
        name, value = chart.mark
        legend.append(f'<li><i class="line"></i>{escape(name)}: {_number(value)} {chart.unit}</li>')
    if len(chart.bars) > MOST_SHOWN:
        legend.append(f"<li>{MOST_SHOWN} of {len(chart.bars)} shown</li>")
    return f'<div class="bars">{"".join(rows)}</div>{_legend(legend)}'


def _piece(bar: str, part: str, value: float, longest: float, chart: Bars) -> str:
    text = _number(value)
    shown = text if len(chart.parts) > 1 and value / longest > _SHARE_A_CHARACTER * len(text) else ""
    title = escape(f"{bar}, {part}: {value:.3f} {chart.unit}", quote=True)
    return f'<i class="{class_of(part)}" style="width:{100 * value / longest:.3f}%" title="{title}">{shown}</i>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _share(value: float | None, whole: float, unit: str) -> str:
    return "" if value is None else f" <b>{_number(value)} {unit}, {value / whole:.1%}</b>"


def _legend(items: Sequence[str]) -> str:
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


def timeline(chart: Timeline) -> str:
    """Return a row for each rank, hidden communication as a thin line below it, and a time axis."""
    tracks = ["".join(_stretch(each, chart) for each in chart.stretches if each.row == row)
              for row in range(len(chart.rows))]  # fmt: skip
    behind = ["".join(_stretch(each, chart) for each in chart.behind if each.row == row)
              for row in range(len(chart.rows))]  # fmt: skip
    begins = ["".join(f'<b style="left:{100 * ms / chart.end_ms:.3f}%"></b>' for at, ms in chart.steps if at == row)
              for row in range(len(chart.rows))]  # fmt: skip
    rows = "".join(
        f'<span>{escape(name)}</span><div class="track">{track}{begin}</div>'
        + (f'<span></span><div class="behind">{under}</div>' if chart.behind else "")
        for name, track, under, begin in zip(chart.rows, tracks, behind, begins, strict=True)
    )
    ticks = "".join(
        f'<span style="left:{100 * tick / chart.end_ms:.3f}%">{format_number(tick)}</span>'
        for tick in even_ticks(0.0, chart.end_ms * 0.97, 7)
    )
    items = [f'<li><i class="{class_of(part)}"></i>{escape(part)}</li>' for part in chart.parts]
    items.append('<li><i class="line"></i>a step begins</li>')
    return f'<div class="timeline">{rows}<span></span><div class="times">{ticks}</div></div>{_legend(items)}'


def _stretch(each: Stretch, chart: Timeline) -> str:
    share = max(_LEAST_SHARE, (each.end_ms - each.begin_ms) / chart.end_ms)
    bucket = f", bucket {each.bucket}" if each.bucket >= 0 else ""
    length = format_number(each.end_ms - each.begin_ms)
    title = escape(f"{chart.rows[each.row]}, {each.part}{bucket}: {length} ms from {each.begin_ms:.3f}", quote=True)
    return (
        f'<i class="{class_of(each.part)}" style="left:{100 * each.begin_ms / chart.end_ms:.3f}%;'
        f'width:{100 * share:.3f}%" title="{title}"></i>'
    )
