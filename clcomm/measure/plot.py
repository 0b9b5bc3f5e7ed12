"""Charts of `clcomm bench` as a PNG."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clcomm.drawing.axes import log_axes, plot
from clcomm.drawing.colours import OKABE_ITO
from clcomm.drawing.png import draw
from clcomm.drawing.scene import SAMPLE, Dot, Key, Path, Scene

#: The styles of lines: all colours, then all again dashed and dotted.
_STYLES = [(colour, dash) for dash in ((), (6.0, 3.0), (2.0, 2.0)) for colour in OKABE_ITO]
#: Pixels: the height of a plot, the least width in which its labels fit, and the distance of the axes' names.
_BOTTOM, _ROOM = 440, 500
_Lines = dict[tuple[str, str], list[dict[str, Any]]]


def draw_bench(document: dict[str, Any], path: str) -> None:
    """Draw median times and bus bandwidths by size, log-log, a line for each operation and transport.

    A band shows the range from the fastest call to the 99th percentile. With one rank, where nothing crosses a link,
    only times are drawn. `document` is the content of --json's file. Raises ArgumentError if `path` cannot be written.
    """
    ranks = document["world_size"]
    title = "1 rank" if ranks == 1 else f"{ranks} ranks, {document['ranks_per_host']} a host"
    draw(scenes(document["rows"]), path, "--plot", title)


def scenes(rows: Sequence[dict[str, Any]]) -> list[Scene]:
    """Return the charts of the rows in --json's file."""
    lines: _Lines = {}
    for row in rows:
        lines.setdefault((row["operation"], row["transport"]), []).append(row)
    crossing = {name: each for name, each in lines.items() if all(row["busbw_gb_s"] > 0 for row in each)}
    styles = dict(zip(lines, itertools.cycle(_STYLES), strict=False))
    keys = [
        Key([Path([(0.0, SAMPLE / 2), (1.0, SAMPLE / 2)], *_pen(style))], ", ".join(name))
        for name, style in styles.items()
    ]
    times = _scene("Time of a call", "us: median, band from min to p99", lines, styles, "p50_us", "min_us", "p99_us")
    found = [replace(times, keys=keys)]
    return [*found, _scene("Bus bandwidth", "GB/s, 10^9 bytes", crossing, styles, "busbw_gb_s")] if crossing else found


def _pen(style: tuple[str, tuple[float, ...]]) -> tuple[str, float, tuple[float, ...]]:
    return style[0], 2.0, style[1]


def _scene(title: str, name: str, lines: _Lines, styles: dict[tuple[str, str], Any], figure: str, *band: str) -> Scene:
    """Return a chart of one figure of the rows, with a band between two others."""
    rows = list(itertools.chain(*lines.values()))
    points = [(row["bytes"], row[each]) for row in rows for each in (figure, *band)]
    x, y = log_axes(points, _BOTTOM, (f"size ({rows[0]['dtype']} array, bytes)", name), "{:g}".format, 16)

    def places(line: Sequence[dict[str, Any]], figure: str) -> list[tuple[float, float]]:
        return [(x.scale(row["bytes"]), y.scale(row[figure])) for row in line]

    marks = y.at_left()
    for each, line in lines.items() if band else ():
        low, high = (places(line, edge) for edge in band)
        marks.append(Path([*low, *high[::-1]], fill=styles[each][0], opacity=0.15))
    for each, line in lines.items():
        marks.append(Path(places(line, figure), *_pen(styles[each])))
        marks += [Dot(*place, 3.0, styles[each][0]) for place in places(line, figure)]
    return plot(title, marks, x, _BOTTOM, room=_ROOM)
