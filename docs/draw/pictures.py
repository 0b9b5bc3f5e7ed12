"""Drawings of measurements: timelines of steps, and small charts."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from clcomm.base.units import format_size
from clcomm.insight.drawing.scene import CHARACTER, Mark, Path, Rect, Scale, Text, even_ticks
from docs.draw.measure import ranks_of
from docs.extensions.svg import BLUE, FONT, GREEN, GREY, LINE, PURPLE, VERMILLION, legend, line, svg

WIDTH, LEFT = 700, 70
_STEP = {"forward": GREEN, "backward": BLUE}
_COMMUNICATION = {"wait": VERMILLION, "transfer": BLUE, "exposed": BLUE}
_NAMES = (
    ("forward and backward", GREEN), ("waiting for ranks", VERMILLION), ("moving and adding", BLUE),
    ("optimizer", PURPLE),
)  # fmt: skip
Slices = Sequence[Sequence[Any]]


def all_drawings(measured: dict[str, Any]) -> dict[str, str]:
    """Return the drawings of what was measured, by file name."""
    known: dict[str, tuple[str, Callable[[Any], str]]] = {
        "data-parallel": ("data_parallel", data_parallel), "buckets": ("buckets", buckets),
        "all-reduce": ("window", window), "overlap": ("overlap", overlap), "zero": ("zero", zero),
        "pipeline": ("pipeline", pipeline), "slow-rank": ("slow_rank", slow_rank),
    }  # fmt: skip
    return {file: draw(measured[name]) for file, (name, draw) in known.items() if name in measured}


def data_parallel(slices: Slices) -> str:
    parts = legend(0, FONT, _NAMES)
    bottom, rows = timeline(slices, 30, _end(slices))
    return svg(WIDTH, bottom, parts + rows)


def slow_rank(measured: dict[str, Any]) -> str:
    """Draw a step in which one rank loads its batch late, above what the report says of it."""
    slices = measured["slices"]
    parts = legend(0, FONT, [("loading a batch", GREY), ("computing", GREEN), *_NAMES[1:]])
    y, rows = timeline(slices, 30, _end(slices), loading=True)
    parts += [*rows, Text(0, y + 24, "clcomm report", bold=True)]
    lines = textwrap.wrap(measured["sentence"], round((WIDTH - LEFT) / CHARACTER))
    parts += [Text(0, y + 24 + LINE * number, text) for number, text in enumerate(lines, 1)]
    return svg(WIDTH, y + 32 + LINE * len(lines), parts)


def overlap(sides: dict[str, Slices]) -> str:
    parts, y = legend(0, FONT, [*_NAMES[:3], ("in the background", GREY)]), 46.0
    end = max(map(_end, sides.values()))
    for how, slices in sides.items():
        length = max(each[4] for each in slices if each[2] == "step")
        parts.append(Text(0, y, f"overlap {how}: a step of {length:.1f} ms", bold=True))
        y, rows = timeline(slices, y + 10, end, background=True)
        parts += rows
        y += 24
    return svg(WIDTH, y - 20, parts)


def _end(slices: Slices) -> float:
    return max(each[3] + each[4] for each in slices)


def timeline(
    slices: Slices, top: float, end: float, background: bool = False, loading: bool = False
) -> tuple[float, list[Mark]]:
    """Return where the drawing ends and its parts: two rows a rank, computing above communicating, over one axis.

    `background` draws the all-reduces that run beside the computation, `loading` the waits for batches.
    """
    parts: list[Mark] = []
    y = top
    x = Scale(0.0, end, LEFT, WIDTH - 10)
    for rank in ranks_of(slices):
        parts.append(Text(0, y + 24, f"rank {rank}"))
        for begin, stop, colour in computing(slices, rank, end / 150):
            parts.append(Rect(x(begin), y, x(stop) - x(begin), 18, colour, f"{stop - begin:.2f} ms"))
        for _, thread, name, begin, length in (each for each in slices if each[0] == rank):
            note = f"{name}: {length:.2f} ms"
            if thread == "data" and loading:
                parts.append(Rect(x(begin), y, x(begin + length) - x(begin), 18, GREY, note))
            if thread == "communication" and name.startswith("all_reduce") and background:
                parts.append(Rect(x(begin), y + 20, x(begin + length) - x(begin), 18, GREY, note, opacity=0.55))
        for _, thread, name, begin, length in (each for each in slices if each[0] == rank):
            if thread == "communication" and name in _COMMUNICATION:
                note = f"{name}: {length:.2f} ms"
                parts.append(Rect(x(begin), y + 20, x(begin + length) - x(begin), 18, _COMMUNICATION[name], note))
        y += 48
    return y + 22, parts + time_axis(x, end, y)


def computing(slices: Slices, rank: int, gap: float) -> list[tuple[float, float, str]]:
    """Return when a rank's kernels ran: begin, end, colour; those with less than `gap` between them are one."""
    runs: list[tuple[float, float, str]] = []
    for _, _, name, begin, length in (each for each in slices if each[:2] == [rank, "device"]):
        colour = PURPLE if name.startswith(("sgd", "adam")) else GREEN
        if runs and runs[-1][2] == colour and begin - runs[-1][1] < gap:
            runs[-1] = (runs[-1][0], begin + length, colour)
        else:
            runs.append((begin, begin + length, colour))
    return runs


def time_axis(x: Scale, end: float, y: float) -> list[Mark]:
    """Return an axis of milliseconds, with the unit beside the last tick."""
    ticks = even_ticks(0.0, end, 8)
    marks: list[Mark] = [line(x(0), y, x(end), y)]
    for at in ticks:
        marks += [
            line(x(at), y, x(at), y + 5),
            Text(x(at), y + 19, f"{at:g}{' ms' if at == ticks[-1] else ''}", "middle"),
        ]
    return marks


def buckets(measured: dict[str, Any]) -> str:
    """Draw the flat space with its tensors, and below it each way to cut it, with the time that it takes."""
    tensors, variants = measured["tensors"], measured["variants"]
    shares = [nbytes ** (1 / 3) for _, nbytes in tensors]  # or small tensors could not be seen
    left, right = 96.0, 150.0
    unit = (WIDTH - left - right) / sum(shares)
    edges, at, total = [left], left, [0]
    for share, (_, nbytes) in zip(shares, tensors, strict=True):
        at += share * unit
        edges.append(at)
        total.append(total[-1] + nbytes)
    parts: list[Mark] = [Text(0, 34, "flat space")]
    for (name, nbytes), begin, end in zip(tensors, edges[:-1], edges[1:], strict=True):
        parts.append(Rect(begin, 20, end - begin - 1.5, 20, GREEN, f"{name}: {format_size(nbytes)}"))
    parts += [Text(left, 13, "last layer, which backward completes first"), Text(WIDTH - 4, 13, "time of all", "end")]
    slowest = max(each["alone_ms"]["median"] for each in variants.values())
    for row, (name, each) in enumerate(sorted(variants.items(), key=lambda item: -len(item[1]["buckets"]))):
        y, begin, done = 58.0 + row * 34, left, 0
        parts.append(Text(0, y + 15, name.replace("KiB", " KiB").replace("MiB", " MiB")))
        for nbytes in each["buckets"]:
            done += nbytes
            end = edges[min(range(len(total)), key=lambda place: abs(total[place] - done))]
            parts.append(Rect(begin, y, end - begin - 1.5, 20, BLUE, format_size(nbytes)))
            begin = end
        length = 70 * each["alone_ms"]["median"] / slowest
        parts.append(Rect(WIDTH - right + 12, y + 4, length, 12, VERMILLION))
        parts.append(Text(WIDTH - right + 18 + length, y + 15, f"{1e3 * each['alone_ms']['median']:.0f} us"))
    return svg(WIDTH, 58 + 34 * len(variants), parts)


def window(rows: Sequence[dict[str, Any]]) -> str:
    """Draw the time of all-reduces by size, both axes logarithmic."""
    height, bottom, left = 260.0, 226.0, 66.0
    sizes, times = [row["bytes"] for row in rows], [row["us"] for row in rows]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))
    x = Scale(min(sizes), max(sizes), left, WIDTH - 120, logarithmic=True)
    y = Scale(low, high, bottom, 20, logarithmic=True)
    parts: list[Mark] = []
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        us = 10.0**power
        label = f"{us:g} us" if us < 1000 else f"{us / 1000:g} ms"
        parts += [line(left, y(us), WIDTH - 120, y(us), (3.0, 3.0)), Text(left - 8, y(us) + 4, label, "end")]
    for nbytes in sorted(set(sizes))[::2]:
        parts.append(Text(x(nbytes), bottom + 18, format_size(nbytes), "middle"))
    for transport, colour in (("shared", BLUE), ("mpi", VERMILLION)):
        points = [(x(row["bytes"]), y(row["us"])) for row in rows if row["transport"] == transport]
        parts.append(Path(points, colour, 2.0))
        parts += [Rect(px - 3, py - 3, 6, 6, colour) for px, py in points]
        name = "shared memory" if transport == "shared" else "messages"
        parts.append(Text(points[-1][0] + 10, points[-1][1] + 4, name))
    return svg(WIDTH, height, parts)


def zero(stages: dict[str, dict[str, int]]) -> str:
    """Draw what a rank keeps, a bar a stage."""
    colours = {"parameters": BLUE, "gradients": GREEN, "optimizer_state": VERMILLION}
    whole = max(sum(each.values()) for each in stages.values())
    parts = legend(0, FONT, [(name.replace("_", " "), colour) for name, colour in colours.items()])
    for row, (stage, kept) in enumerate(stages.items()):
        y, x = 32.0 + row * 32, 150.0
        parts.append(Text(0, y + 16, "plain" if stage == "0" else f"ZeRO {stage}"))
        for name, colour in colours.items():
            width = 400 * kept[name] / whole
            parts.append(Rect(x, y, width, 22, colour, f"{name}: {format_size(kept[name])}"))
            x += width
        parts.append(Text(x + 8, y + 16, format_size(sum(kept.values()))))
    return svg(WIDTH, 32 + 32 * len(stages) + 6, parts)


def pipeline(schedules: dict[str, Slices]) -> str:
    """Draw forwards and backwards of each stage, a schedule above the other."""
    parts, y = legend(0, FONT, [("forward", GREEN), ("backward", BLUE)]), 42.0
    end = max(
        each[3] + each[4] for slices in schedules.values() for each in slices if each[2] in ("forward", "backward")
    )
    x = Scale(0.0, end, LEFT, WIDTH - 10)
    for name, slices in schedules.items():
        parts.append(Text(0, y, name, bold=True))
        y += 8
        for rank in ranks_of(slices):
            parts.append(Text(0, y + 15, f"rank {rank}"))
            for each in slices:
                if each[0] == rank and each[2] in ("forward", "backward"):
                    width = max(x(each[3] + each[4]) - x(each[3]) - 1, 1)
                    parts.append(Rect(x(each[3]), y, width, 20, _STEP[each[2]], f"{each[2]}: {each[4]:.1f} ms"))
            y += 24
        parts += time_axis(x, end, y)
        y += LINE + 28
    return svg(WIDTH, y - 20, parts)
