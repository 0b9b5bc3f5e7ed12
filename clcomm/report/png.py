"""A report's charts as one picture; needs matplotlib, which is an extra."""

from __future__ import annotations

from typing import Any

from clcomm.errors import ArgumentError
from clcomm.report.axes import CALLS, SIZE, TIME, log_ticks, size_text, size_ticks, time_text
from clcomm.report.model import Report
from clcomm.report.shapes import MOST_SHOWN, Bars, Chart, Distribution, Points, colour_of

_PALETTE = (
    "#8a6d3b", "#2f7d4f", "#8457b8", "#d9730d", "#1f6fc0", "#b04a8f", "#4c9a8b", "#b3473f", "#aab2ba", "#0a8fa6",
    "#a38a00", "#3f51b5", "#7d4a3c", "#cfd8e3",
)  # fmt: skip
_COLUMN, _LINE = _PALETTE[4], _PALETTE[3]


def draw(report: Report, path: str) -> None:
    """Draw all charts, two beside each other; raises ArgumentError when the file can't be written."""
    import matplotlib
    from matplotlib.figure import Figure

    charts = report.charts
    if not charts:
        raise ArgumentError("--format png: there is nothing to draw in this run")
    rows = -(-len(charts) // 2)
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 3.6 * rows), layout="constrained")
        places = figure.subplots(rows, 2, squeeze=False).flat
        for axes, chart in zip(places, charts, strict=False):
            _draw(axes, chart)
        for axes in list(places)[len(charts) :]:
            axes.set_visible(False)
        figure.suptitle(_literal(report.title))
        try:
            figure.savefig(path, dpi=120, format="png")
        except OSError as error:
            raise ArgumentError(f"-o: expected a file to write, got {path!r}: {error.strerror}") from None


def _draw(axes: Any, chart: Chart) -> None:
    axes.set_title(chart.title, loc="left", fontweight="bold")
    if isinstance(chart, Bars):
        _draw_bars(axes, chart)
    elif isinstance(chart, Distribution):
        _draw_distribution(axes, chart)
    else:
        _draw_points(axes, chart)


def _draw_bars(axes: Any, chart: Bars) -> None:
    names = [_literal(name) for name in chart.bars[:MOST_SHOWN]]
    begin = [0.0] * len(names)
    for index, part in enumerate(chart.parts):
        values = [row[index] for row in chart.values[:MOST_SHOWN]]
        axes.barh(range(len(names)), values, 0.6, begin, label=part, color=_PALETTE[colour_of(part)])
        begin = [left + value for left, value in zip(begin, values, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names), -1)
    axes.set_xlabel(", ".join(text for text in (chart.unit, chart.note) if text))
    if len(chart.parts) > 1:
        axes.legend(fontsize=8, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.16), frameon=False)


def _draw_distribution(axes: Any, chart: Distribution) -> None:
    axes.stairs(chart.counts, chart.edges_s, fill=True, color=_COLUMN)
    for (name, seconds), line in zip(chart.marks, ("-", "--", ":"), strict=False):
        axes.axvline(seconds, linestyle=line, color=_LINE, label=f"{name} {time_text(seconds)}")
    axes.set_xscale("log")
    _set_ticks(axes.xaxis, log_ticks(chart.edges_s[0], chart.edges_s[-1]), time_text)
    axes.set_xlabel(TIME)
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


def _set_ticks(axis: Any, ticks: list[float], write: Any) -> None:
    axis.set_ticks(ticks, [write(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def _literal(text: str) -> str:
    """Return text of which matplotlib makes no formulas."""
    return text.replace("$", r"\$")
