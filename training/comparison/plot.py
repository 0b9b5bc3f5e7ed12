"""Step time, and the time of its reductions alone, by bucket size: measured points and the cost model's curves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from clcomm.base.units import format_number, format_size
from clcomm.comm.communicator import Communicator
from clcomm.comm.costs.estimates import METHOD, Estimate
from clcomm.comm.costs.forecast import recommend
from clcomm.comm.costs.model import Fit, fit, plan_s
from clcomm.insight.drawing import svg
from clcomm.insight.drawing.scene import (
    BLUE,
    FONT,
    GREEN,
    SAMPLE,
    VERMILLION,
    Axis,
    Dot,
    Key,
    Path,
    Scale,
    Scene,
    Text,
    even_ticks,
    level,
    plot,
    text_width,
    upright,
)
from clcomm.insight.measure.collective_cases import PreparedAllReduceCase
from clcomm.insight.measure.timing import MeasuredTransport, TimingSchedule, sizes_between, time_calls
from training.comparison.outcome import Outcome, reference_of

#: The smallest size of the calls that are timed, in bytes, and the ratio of one size to the next.
_SMALLEST, _FACTOR = 1 << 10, 4.0
#: The place of single tensors on the axis of bucket sizes.
_PER_TENSOR_AT = 1 << 8
#: Pixels: the picture's width, that of a plot, and where a plot ends.
_WIDTH, _ROOM, _BOTTOM = 1000, 850, 400


def measure_costs(outcomes: Sequence[Outcome]) -> dict[str, Fit]:
    """Return alpha and beta of an all-reduce for each compared transport, fitted to separate calls.

    Nothing else runs meanwhile, so that no call waits for a rank that computes. Sums are made as in the training. Empty
    in a world of one. Collective.
    """
    session = outcomes[0].session
    if session.comm.size == 1:
        return {}
    fold = session.trainer.sync.models.of(session.parts.model).space.adapter.fold
    transports = sorted({outcome.variant.transport for outcome in outcomes})
    targets = [MeasuredTransport(transport, fold=fold) for transport in transports]
    points: dict[str, list[tuple[int, float]]] = {target.name: [] for target in targets}
    with Communicator(transport="mpi") as control:
        for nbytes in sizes_between(_SMALLEST, max(sum(outcomes[0].buckets), 4 * _SMALLEST), _FACTOR):
            cases = [PreparedAllReduceCase(target.comm, nbytes) for target in targets]
            for target, case, seconds in zip(targets, cases, time_calls(cases, control, TimingSchedule()), strict=True):
                points[target.name].append((case.nbytes, float(np.median(seconds))))
    for target in targets:
        target.comm.finalize()
    return {name: fit(found) for name, found in points.items()}


#: For each transport the predicted seconds by bucket size; None: per tensor.
Predicted = Mapping[str, Sequence[tuple[int | None, float]]]


def alone_curves(outcomes: Sequence[Outcome], costs: Mapping[str, Fit]) -> dict[str, list[tuple[int | None, float]]]:
    """Return for each transport the model's seconds of a plan's all-reduces, by bucket size."""
    tensors = reference_of(outcomes).buckets[::-1]
    return {
        name: [(each.bucket_size, each.seconds) for each in recommend(tensors, fitted.cost.seconds).candidates]
        for name, fitted in costs.items()
    }


def curves(outcomes: Sequence[Outcome], costs: Mapping[str, Fit]) -> dict[str, list[tuple[int | None, float]]]:
    """Return for each transport the predicted seconds of a step by bucket size (None: per tensor).

    The rest of a step is one number for all plans, the median over the measured ones.
    """
    if not costs:
        return {}
    rest = [
        float(np.nanmedian(each.step_s)) - plan_s(each.buckets, costs[each.variant.transport].cost.seconds)
        for each in outcomes
        if not each.variant.overlap and np.isfinite(each.step_s).any()
    ]
    rest_s = statistics.median(rest)
    return {name: [(size, rest_s + s) for size, s in points] for name, points in alone_curves(outcomes, costs).items()}


#: Returns the figure of an outcome to draw, in seconds.
Figures = Callable[[Outcome], Estimate]


def draw(outcomes: Sequence[Outcome], costs: Mapping[str, Fit], title: str, path: str) -> None:
    """Draw both charts as an SVG file; raises ArgumentError if it cannot be written."""
    svg.draw(scenes(outcomes, costs), path, "--plot", title, width=_WIDTH)


def scenes(outcomes: Sequence[Outcome], costs: Mapping[str, Fit]) -> list[Scene]:
    """Return the charts: step time, and, where measured, the time of the reductions alone."""
    step = _panel("Time of a step", outcomes, lambda each: each.timing(each).step_s, curves(outcomes, costs))
    if not any(np.isfinite(outcome.alone_s).any() for outcome in outcomes):
        return [step]
    alone: Figures = lambda each: each.timing(each).alone_s  # noqa: E731
    return [step, _panel("A step's reductions alone", outcomes, alone, alone_curves(outcomes, costs))]


def _panel(title: str, outcomes: Sequence[Outcome], figures: Figures, predicted: Predicted) -> Scene:
    """Return each transport's points, and its curve if there is one, over bucket sizes."""
    names = sorted({outcome.variant.transport for outcome in outcomes})
    colours = dict(zip(names, (BLUE, VERMILLION, GREEN), strict=False))  # at most three: auto, mpi and shared
    end = max(sum(outcomes[0].buckets), *map(_place, outcomes))
    found = [(each, figures(each).scaled(1e3)) for each in outcomes]
    found = [(each, ms) for each, ms in found if np.isfinite(ms.median)]  # auto may not have decided
    shown = {name: _steps(points, end) for name, points in predicted.items()}
    measured = [value for _, ms in found for value in (ms.median, ms.high or 0.0)]
    x, y = _axes(end, max([*measured, *(ms for points in shown.values() for _, ms in points)]))
    marks = y.at_left()
    keys, notes = [], []
    for name, colour in colours.items():
        label = _in_legend([each for each in outcomes if each.variant.transport == name][-1])
        if name in shown:
            marks.append(Path([(x.scale(at), y.scale(ms)) for at, ms in shown[name]], colour, 1.5, opacity=0.6))
            keys.append(Key([level(0.0, 1.0, SAMPLE / 2, colour, 1.5)], f"{label}: cost model"))
        keys.append(Key([Dot(0.5, SAMPLE / 2, 4.0, colour)], f"{label}: measured"))
    for outcome, ms in found:
        place, colour = (x.scale(_place(outcome)), y.scale(ms.median)), colours[outcome.variant.transport]
        if ms.low is not None and ms.high is not None:
            marks.append(upright(place[0], y.scale(ms.high), y.scale(ms.low), colour, 2.0))
        marks.append(Dot(*place, 4.0, colour))
        marks += [Dot(*place, 2.0, "card")] if outcome.variant.overlap else []
        notes.append(Text(*place, f"{outcome.variant.name} {format_number(ms.median)}", shift=8.0))
    scene = plot(title, [*marks, *_separated(notes)], x, _BOTTOM, f"bars: {METHOD}; hollow: with overlap", room=_ROOM)
    return replace(scene, keys=keys, wide=True)


def _axes(end: int, most_ms: float) -> tuple[Axis, Axis]:
    sizes = [_PER_TENSOR_AT, *(1 << exponent for exponent in range(10, 40, 2) if 1 << exponent <= 2 * end)]
    across = Scale(_PER_TENSOR_AT / 2, 16 * end, logarithmic=True)  # at the right is room for the points' names
    down = Scale(0.0, 1.1 * most_ms, _BOTTOM, 28.0)
    return (
        Axis(across, sizes, lambda at: "per tensor" if at < 1000 else format_size(round(at)), "bucket size"),
        Axis(down, even_ticks(0.0, 1.1 * most_ms, 7), format_number, "ms"),
    )


def _in_legend(outcome: Outcome) -> str:
    """Return the transport asked for, and the one that carried the gradients where that is another."""
    asked = outcome.variant.transport
    return asked if outcome.moved_by == asked else f"{asked} ({outcome.moved_by})"


def _separated(notes: Sequence[Text]) -> list[Text]:
    """Return the notes, moved towards the middle until none overlaps with another."""

    def overlap(one: Text, other: Text) -> bool:
        left, right = sorted((one, other), key=lambda note: note.x)
        return _ROOM * (right.x - left.x) < text_width(left.words) and abs(one.y - other.y) < FONT + 2

    placed: list[Text] = []
    for note in sorted(notes, key=lambda note: note.y):
        move = 1.0 if note.y < _BOTTOM / 2 else -1.0
        while any(overlap(note, other) for other in placed):
            note = note._replace(y=note.y + move)
        placed.append(note)
    return placed


def _steps(points: Sequence[tuple[int | None, float]], end: int) -> list[tuple[float, float]]:
    """Return the curve's places and milliseconds: a plan holds from its size up to the next."""
    at = [size or _PER_TENSOR_AT for size, _ in points]
    stretches = zip(at, [*at[1:], max(end, at[-1])], (seconds * 1e3 for _, seconds in points), strict=True)
    return [(place, ms) for begin, stop, ms in stretches for place in (begin, stop)]


def _place(outcome: Outcome) -> int:
    """Return an outcome's place on the axis of bucket sizes."""
    return outcome.bucket_size or _PER_TENSOR_AT
