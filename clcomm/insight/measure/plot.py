"""Charts of `clcomm bench`, and drawings of schedules as space-time diagrams, as SVG files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clcomm.base.schedules import Schedule
from clcomm.comm.stats.events import Row
from clcomm.insight.drawing.scene import (
    DASHED,
    OKABE_ITO,
    SAMPLE,
    Dot,
    Key,
    Mark,
    Path,
    Scene,
    Text,
    arrow,
    log_axes,
    plot,
    upright,
)
from clcomm.insight.drawing.svg import draw

#: The styles of lines: all colours, then all again dashed and dotted.
_STYLES = [(colour, dash) for dash in ((), (6.0, 3.0), (2.0, 2.0)) for colour in OKABE_ITO]
#: Pixels: the height of a plot, the least width in which its labels fit, and the distance of the axes' names.
_BOTTOM, _ROOM = 440, 500
_Lines = dict[tuple[str, str], list[Row]]
#: Pixels: from a rank to the next, a round, and the names of ranks above and of rounds beside.
_RANK, _ROUND, _ABOVE, _BESIDE = 140.0, 84.0, 24.0, 70.0


def draw_bench(document: Mapping[str, Any], path: str) -> None:
    """Draw median times and bus bandwidths by size, log-log, a line for each operation and transport.

    A band shows the range from the fastest call to the 99th percentile. With one rank, where nothing crosses a link,
    only times are drawn. `document` is the content of --json's file. Raises ArgumentError if `path` cannot be written.
    """
    ranks = document["world_size"]
    title = "1 rank" if ranks == 1 else f"{ranks} ranks, {document['ranks_per_host']} a host"
    draw(scenes(document["rows"]), path, "--plot", title)


def scenes(rows: Sequence[Row]) -> list[Scene]:
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

    def places(line: Sequence[Row], figure: str) -> list[tuple[float, float]]:
        return [(x.scale(row["bytes"]), y.scale(row[figure])) for row in line]

    marks = y.at_left()
    for each, line in lines.items() if band else ():
        low, high = (places(line, edge) for edge in band)
        marks.append(Path([*low, *high[::-1]], fill=styles[each][0], opacity=0.15))
    for each, line in lines.items():
        marks.append(Path(places(line, figure), *_pen(styles[each])))
        marks += [Dot(*place, 3.0, styles[each][0]) for place in places(line, figure)]
    return plot(title, marks, x, _BOTTOM, room=_ROOM)


def draw_schedule(schedule: Schedule, path: str) -> None:
    """Draw ranks as vertical lines, rounds downwards, and each message as an arrow in its block's colour.

    Solid arrows are added by the receiver, dashed ones copied. Raises ArgumentError if `path` cannot
    be written.
    """
    draw([scene_of(schedule)], path, "--plot", width=max(620.0, 2 * _BESIDE + _RANK * schedule.ranks))


def scene_of(schedule: Schedule) -> Scene:
    bottom, room = _ABOVE + _ROUND * len(schedule.rounds), _RANK * max(1, schedule.ranks - 1)

    def x(rank: int) -> float:
        return rank / max(1, schedule.ranks - 1)

    marks: list[Mark] = [Text(0.0, _ABOVE + 14, "round", shift=-_BESIDE)]
    for rank in range(schedule.ranks):
        marks += [upright(x(rank), _ABOVE, bottom, "soft"), Text(x(rank), 12.0, f"rank {rank}", "middle")]
    for number, messages in enumerate(schedule.rounds):
        top = _ABOVE + _ROUND * number
        marks.append(Text(0.0, top + _ROUND / 2 + 4, str(number + 1), shift=-_BESIDE + 8))
        for each in messages:
            begin, end = (x(each.sender), top + 0.1 * _ROUND), (x(each.receiver), top + 0.9 * _ROUND)
            colour = OKABE_ITO[each.first % len(OKABE_ITO)]
            marks += arrow(begin, end, colour, room, () if each.adds else DASHED)
    title, note = f"{schedule.name}: {schedule.messages} messages", "colour: first block; solid: added, dashed: copied"
    return Scene(title, bottom, marks, _BESIDE, _BESIDE / 2, (), note)
