"""The roofline of a core: the speed of each case by its floating-point operations for each byte that it has to move.

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52 (4), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.kernels.cases import Case
from clcomm.insight.drawing.scene import BLUE, GREEN, VERMILLION, Dot, Mark, Path, Rect, Scale, Text, level, log_ticks
from clcomm.insight.drawing.svg import as_file

_WIDTH, _HEIGHT, _BESIDE, _TOP, _BOTTOM = 760, 420, 60, 40, 372
_STYLE = "svg{--ink:#222;--soft:#444;--line:#7f868d;--card:#fff;font-family:sans-serif}text{fill:var(--soft)}"
_COLOURS = {"gemm": BLUE, "conv": VERMILLION, "block": GREEN}


class Point(NamedTuple):
    """A case with its operations for each byte, and its speed in GFLOP/s."""

    case: Case
    intensity: float
    speed: float


def bytes_of(case: Case) -> float:
    """Return the bytes that a product or convolution has to read and write at least; 0 for other cases."""
    sizes = case.sizes
    if case.kind == "gemm":
        m, n, k = (sizes[name] for name in "mnk")
        return 4.0 * (m * k + k * n + m * n)
    if case.kind not in ("conv", "block"):
        return 0.0
    pixels = sizes["batch"] * sizes["side"] ** 2
    x, w = pixels * sizes["channels"], sizes["channels"] * sizes["outputs"] * sizes["kernel"] ** 2
    y = pixels * sizes["outputs"] / (sizes["stride"] ** 2 * (4 if case.kind == "block" else 1))
    if case.passes == "forward":
        return 4.0 * (x + w + y)
    return 4.0 * (2 * x + w + y + (0 if case.first else x + w) + w + y)  # x again, dy, dw, and where needed w and dx


def points(cases: Sequence[Case], speeds: dict[str, float]) -> list[Point]:
    """Return the points of the cases whose bytes are known."""
    known = [(case, bytes_of(case)) for case in cases]
    return [Point(case, case.flops / nbytes, speeds[case.name]) for case, nbytes in known if nbytes]


def draw(found: Sequence[Point], peak: float, copied: float) -> str:
    """Return the drawing as SVG; peak: GFLOP/s of multiply-adds, copied: GB/s that a copy reads and writes."""
    places = [*(point.intensity for point in found), peak / copied]
    least, most = min(places), max(places)
    lowest = min(*(point.speed for point in found), peak)
    x = Scale(least / 1.5, most * 1.5, _BESIDE / _WIDTH, 1 - 20 / _WIDTH, logarithmic=True)
    y = Scale(lowest / 1.5, peak * 1.5, _BOTTOM, _TOP, logarithmic=True)
    ridge = peak / copied
    roof = [
        (place, min(peak, copied * place)) for place in (max(least / 1.5, lowest / 1.5 / copied), ridge, most * 1.5)
    ]
    marks: list[Mark] = [
        *(Text(x(tick), _BOTTOM + 18, f"{tick:g}", "middle") for tick in log_ticks(least / 1.5, most * 1.5)),
        *(Text(_BESIDE / _WIDTH, y(tick) + 4, f"{tick:g}", "end", -8) for tick in log_ticks(lowest / 1.5, peak * 1.5)),
        level(_BESIDE / _WIDTH, 1 - 20 / _WIDTH, _BOTTOM, "line"),
        Text(0.5, _HEIGHT - 12, "floating-point operations a byte", "middle"),
        Text(8 / _WIDTH, 18, f"GFLOP/s of one core; peak {peak:.0f} GFLOP/s, a copy {copied:.0f} GB/s"),
        Path([(x(place), y(speed)) for place, speed in roof], "ink", 2.0),
    ]
    for point in found:
        share = point.speed / min(peak, copied * point.intensity)
        note = f"{point.case.name}: {point.speed:.1f} GFLOP/s, {share:.0%} of the roof"
        marks.append(Dot(x(point.intensity), y(point.speed), 4, _COLOURS[point.case.kind], note))
    for number, kind in enumerate(dict.fromkeys(point.case.kind for point in found)):
        at = 0.78 + 0.08 * number
        marks += [Rect(at, 9, 11 / _WIDTH, 11, _COLOURS[kind]), Text(at, 19, kind, shift=16)]
    return as_file(marks, _WIDTH, _HEIGHT, _STYLE)
