"""A report's charts as one PNG; needs matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clcomm.errors import ArgumentError
from clcomm.report.axes import CALLS, SIZE, TIME, WIDE_SPAN, log_ticks, size_text, size_ticks, time_text
from clcomm.report.colours import COMPARED, MEASURED, ink_on, paint_of, stripe_of
from clcomm.report.elements import (
    MOST_SHOWN,
    Bars,
    Chart,
    Curves,
    Distribution,
    Intervals,
    Points,
    Timeline,
)
from clcomm.report.report import Report
from clcomm.storage.files import replacing, unwritable
from clcomm.units import format_number

_COLUMN, _LINE = MEASURED.colour, COMPARED.colour
#: A part of a bar shows its value if it takes more than this share of the longest bar.
_ROOM_FOR_A_VALUE = 0.09
#: Inches: the picture's width; a chart's title and x axis; a row; a legend's row; a chart without rows.
_WIDTH, _FRAME, _BAR_ROW, _LEGEND_ROW, _AXES = 13.0, 0.9, 0.3, 0.18, 3.6
#: Inches from the x axis to the legend below its label.
_AXIS = 0.45
#: Two charts are put side by side if the taller one is at most this many times as tall as the other.
_MOST_TIMES_AS_TALL = 1.3


def draw(report: Report, path: str) -> None:
    """Draw all charts, two side by side; raises ArgumentError if `path` cannot be written."""
    import matplotlib

    if not report.charts:
        raise ArgumentError("--format png: this run has nothing to draw")
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = figure_of(report)
        try:
            with replacing(path) as file:
                figure.savefig(file, dpi=120, format="png")
        except OSError as error:
            raise unwritable("-o", path, error) from None


def figure_of(report: Report) -> Any:
    """Return the figure, a grid of charts."""
    from matplotlib.figure import Figure

    rows = _rows_of(report.charts)
    heights = [max(map(_height, row)) for row in rows]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.5), layout="constrained")
    grid = figure.add_gridspec(len(rows), 2, height_ratios=heights)
    for number, row in enumerate(rows):
        places = [grid[number, :]] if len(row) == 1 else [grid[number, 0], grid[number, 1]]
        for place, chart in zip(places, row, strict=True):
            _draw(figure, place, chart)
    figure.suptitle(_literal("\n".join(text for text in (report.title, report.subtitle) if text)))
    return figure


def _rows_of(charts: Sequence[Chart]) -> list[list[Chart]]:
    """Return the charts in rows of two of similar height; a timeline, or a chart without a match, has its own row."""
    rows, remaining = [], list(charts)
    while remaining:
        row = [remaining.pop(0)]
        beside = [] if isinstance(row[0], Timeline) else [each for each in remaining if _go_together(row[0], each)]
        if beside:
            remaining.remove(beside[0])
        rows.append(row + beside[:1])
    return rows


def _go_together(one: Chart, other: Chart) -> bool:
    low, high = sorted((_height(one), _height(other)))
    return high <= _MOST_TIMES_AS_TALL * low and not isinstance(other, Timeline)


def _height(chart: Chart) -> float:
    """Return a chart's height in inches, with title, axis and legend."""
    if isinstance(chart, Intervals):
        return _FRAME + 2 * _BAR_ROW * len(chart.points)
    if not isinstance(chart, Bars | Timeline):
        return _AXES
    rows = len(chart.bars if isinstance(chart, Bars) else chart.rows)
    legend = -(-len(chart.parts) // _legend_columns(chart))
    return _FRAME + _BAR_ROW * (0.6 + min(MOST_SHOWN, rows)) + _LEGEND_ROW * legend


def _draw(figure: Any, place: Any, chart: Chart) -> None:
    if isinstance(chart, Curves):
        _draw_curves(figure, place, chart)
        return
    axes = figure.add_subplot(place)
    axes.set_title(_literal(chart.title), loc="left", fontweight="bold")
    _DRAW[type(chart)](axes, chart)


def _style(part: str) -> dict[str, Any]:
    """Return a part's colour and stripes as keyword arguments of matplotlib."""
    paint = paint_of(part)
    striped = {"hatch": "////", "edgecolor": stripe_of(paint)} if paint.striped else {"edgecolor": "white"}
    return {"facecolor": paint.colour, "linewidth": 0.4, **striped}


def _draw_bars(axes: Any, chart: Bars) -> None:
    names = [_literal(name) for name in chart.bars[:MOST_SHOWN]]
    begin = [0.0] * len(names)
    for index, part in enumerate(chart.parts):
        values = [row[index] for row in chart.values[:MOST_SHOWN]]
        drawn = axes.barh(range(len(names)), values, 0.7, begin, label=_literal(part), **_style(part))
        if len(chart.parts) > 1:
            shown = [f"{value:.3g}" if value > _ROOM_FOR_A_VALUE * chart.longest else "" for value in values]
            axes.bar_label(drawn, shown, label_type="center", fontsize=8, color=ink_on(paint_of(part)))
        begin = [left + value for left, value in zip(begin, values, strict=True)]
    for row, whole in enumerate(begin):
        axes.annotate(
            f"{whole:.3g} {chart.unit}", (whole, row), (3, 0), textcoords="offset points", va="center", fontsize=8,
            bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5},
        )  # fmt: skip
    axes.set_xlim(0, chart.longest * 1.12)
    _name_rows(axes, names)
    axes.set_xlabel(_literal(", ".join(text for text in (chart.unit, chart.note) if text)))
    if chart.mark:
        name, value = chart.mark
        axes.axvline(value, color="black", linewidth=1.5, label=f"{name}: {value:.3g} {chart.unit}")
    if len(chart.parts) > 1 or chart.mark:
        _legend_below(axes, chart)


def _draw_timeline(axes: Any, chart: Timeline) -> None:
    named: set[str] = set()
    for each, height, shift in [*((s, 0.7, -0.35) for s in chart.stretches), *((s, 0.12, 0.36) for s in chart.behind)]:
        axes.broken_barh(
            [(each.begin_ms, each.end_ms - each.begin_ms)], (each.row + shift, height),
            label=None if each.part in named else _literal(each.part), **{**_style(each.part), "linewidth": 0},
        )  # fmt: skip
        named.add(each.part)
    for row, begin_ms in chart.steps:
        axes.plot([begin_ms, begin_ms], [row - 0.4, row + 0.4], color="black", linewidth=1.2)
    axes.set_xlim(0, chart.end_ms)
    _name_rows(axes, [_literal(name) for name in chart.rows])
    axes.set_xlabel(_literal(chart.note))
    _legend_below(axes, chart)


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _legend_below(axes: Any, chart: Bars | Timeline) -> None:
    """Put the legend, in the order of the parts, below the x axis and its label."""
    from matplotlib.transforms import ScaledTranslation

    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    parts = [part for part in map(_literal, chart.parts) if part in shown]
    names = parts + [name for name in shown if name not in parts]
    below = axes.transAxes + ScaledTranslation(0, -_AXIS, axes.figure.dpi_scale_trans)
    axes.legend(
        [shown[name] for name in names], names,
        fontsize=8, ncols=_legend_columns(chart), loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below,
        borderaxespad=0, frameon=False,
    )  # fmt: skip


def _legend_columns(chart: Bars | Timeline) -> int:
    return 8 if isinstance(chart, Timeline) else 3


def _draw_distribution(axes: Any, chart: Distribution) -> None:
    axes.stairs(chart.counts, chart.edges_s, fill=True, color=_COLUMN)
    for (name, seconds), line in zip(chart.marks, ("-", "--", ":"), strict=False):
        axes.axvline(seconds, linestyle=line, color=_LINE, label=f"{name} {time_text(seconds)}")
    axes.set_xscale("log")
    _set_ticks(axes.xaxis, log_ticks(chart.edges_s[0], chart.edges_s[-1]), time_text)
    axes.set_xlabel(_literal(", ".join(text for text in (TIME, chart.note) if text)))
    axes.set_ylabel(CALLS)
    axes.legend(fontsize=8)


def _draw_points(axes: Any, chart: Points) -> None:
    sizes, times = zip(*chart.points, strict=True)
    axes.plot(*zip(*chart.line, strict=True), color=_LINE, label="alpha + beta n")
    axes.plot(sizes, times, "o", color=_COLUMN, label="this run's buckets")
    axes.set_xscale("log")
    axes.set_yscale("log")
    _set_ticks(axes.xaxis, size_ticks(min(sizes), max(sizes)), size_text)
    _set_ticks(axes.yaxis, log_ticks(*axes.get_ylim()), time_text)
    axes.set_xlabel(SIZE)
    axes.set_ylabel(TIME)
    axes.legend(fontsize=8)


def _draw_intervals(axes: Any, chart: Intervals) -> None:
    names = [_literal(name) for name, *_ in chart.points]
    for row, (_, median, low, high) in enumerate(chart.points):
        if low is not None and high is not None:
            axes.plot([low, high], [row, row], color=_COLUMN, linewidth=2)
        axes.plot([median], [row], "o", color=_COLUMN)
        axes.annotate(format_number(median), (median, row), (0, 6), textcoords="offset points", ha="center")
    axes.set_xlim(left=0)
    _name_rows(axes, names)
    axes.set_xlabel(_literal(", ".join(text for text in (chart.unit, chart.note) if text)))


def _draw_curves(figure: Any, place: Any, chart: Curves) -> None:
    inner = place.subgridspec(len(chart.curves), 1)
    first = None
    for number, curve in enumerate(chart.curves):
        axes = figure.add_subplot(inner[number], sharex=first)
        first = first or axes
        values = [float("nan") if value is None else value for value in curve.values]
        axes.plot(
            chart.steps, values, color=_COLUMN, linewidth=1, marker="o" if len(values) <= 30 else "", markersize=3
        )
        known = [value for value in curve.values if value is not None]
        if known and min(known) > 0 and max(known) > WIDE_SPAN * min(known):
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            _set_ticks(axes.yaxis, log_ticks(low, high, 5), format_number)
        elif known and min(known) >= 0:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(_literal(curve.name.replace(" in it", "").replace(" (", "\n(")), fontsize=7)
        if number == 0:
            note = f" ({chart.note})" if chart.note else ""
            axes.set_title(_literal(f"{chart.title}{note}"), loc="left", fontweight="bold")
        if number < len(chart.curves) - 1:
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel("step")


_DRAW: dict[type, Callable[[Any, Any], None]] = {
    Bars: _draw_bars, Timeline: _draw_timeline, Distribution: _draw_distribution, Points: _draw_points,
    Intervals: _draw_intervals,
}  # fmt: skip


def _set_ticks(axis: Any, ticks: list[float], write: Any) -> None:
    axis.set_ticks(ticks, [write(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def _literal(text: str) -> str:
    """Return the text escaped so that matplotlib does not read it as a formula."""
    return text.replace("$", r"\$")
