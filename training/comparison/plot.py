"""Step time, and the time of its reductions alone, by bucket size: measured points and the cost model's curves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clcomm.communicator import Communicator
from clcomm.costs.forecast import recommend
from clcomm.costs.model import Fit, fit, plan_s
from clcomm.drawing.colours import BLUE, GREEN, VERMILLION
from clcomm.measure.collective_cases import PreparedAllReduce
from clcomm.measure.intervals import METHOD, Estimate
from clcomm.measure.timing import MeasuredTransport, Schedule, sizes_between, time_calls
from clcomm.storage.files import replacing, unwritable
from clcomm.units import format_number, format_size
from training.comparison.outcome import Outcome, reference_of

#: The smallest size of the calls that are timed, in bytes, and the ratio of one size to the next.
_SMALLEST, _FACTOR = 1 << 10, 4.0
#: The place of single tensors on the axis of bucket sizes.
_PER_TENSOR_AT = 1 << 8


def measure_costs(outcomes: Sequence[Outcome]) -> dict[str, Fit]:
    """Return alpha and beta of an all-reduce for each compared transport, fitted to separate calls.

    Nothing else runs meanwhile, so that no call waits for a rank that computes. Sums are made as in the training. Empty
    in a world of one. Collective.
    """
    session = outcomes[0].session
    if session.comm.size == 1:
        return {}
    fold = session.trainer.sync.space_for(session.parts.model).adapter.fold
    transports = sorted({outcome.variant.transport for outcome in outcomes})
    targets = [MeasuredTransport(transport, fold=fold) for transport in transports]
    points: dict[str, list[tuple[int, float]]] = {target.name: [] for target in targets}
    with Communicator(transport="mpi") as control:
        for nbytes in sizes_between(_SMALLEST, max(sum(outcomes[0].buckets), 4 * _SMALLEST), _FACTOR):
            cases = [PreparedAllReduce(target.comm, nbytes) for target in targets]
            for target, case, seconds in zip(targets, cases, time_calls(cases, control, Schedule()), strict=True):
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


def draw(outcomes: Sequence[Outcome], costs: Mapping[str, Fit], title: str, path: str) -> None:
    """Draw both charts as a PNG file; raises ArgumentError if it can't be written. Needs matplotlib, an extra."""
    import matplotlib

    with matplotlib.rc_context({"axes.grid": True, "grid.alpha": 0.3, "font.size": 10}):
        figure = figure_of(outcomes, costs, title)
        try:
            with replacing(path) as file:
                figure.savefig(file, dpi=120, format="png")
        except OSError as error:
            raise unwritable("--plot", path, error) from None


def figure_of(outcomes: Sequence[Outcome], costs: Mapping[str, Fit], title: str) -> Any:
    """Return the figure: step time, and below it, where measured, the time of the reductions alone."""
    from matplotlib.figure import Figure

    panels: list[tuple[str, Figures, Predicted]] = [
        ("time of a step (ms)", lambda outcome: outcome.timing(outcome).step_s, curves(outcomes, costs))
    ]
    if any(np.isfinite(outcome.alone_s).any() for outcome in outcomes):
        alone: Figures = lambda outcome: outcome.timing(outcome).alone_s  # noqa: E731
        panels.append(("a step's reductions alone (ms)", alone, alone_curves(outcomes, costs)))
    figure = Figure(figsize=(9, 4.8 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (name, figures, predicted) in zip(all_axes, panels, strict=True):
        notes = _draw_panel(axes, outcomes, figures, predicted)
        axes.set_ylabel(name)
        _label_sizes(axes)
        _separate(figure, notes)
    all_axes[0].set_title(title, fontsize=11)
    all_axes[0].legend()
    all_axes[-1].set_xlabel(f"bucket size; bars: {METHOD}", fontsize=8)
    return figure


#: Returns the figure of an outcome to draw, in seconds.
Figures = Callable[[Outcome], Estimate]


def _draw_panel(axes: Any, outcomes: Sequence[Outcome], figures: Figures, predicted: Predicted) -> list[Any]:
    """Draw each transport's points, and its curve if there is one; return the points' labels."""
    names = sorted({outcome.variant.transport for outcome in outcomes})
    colours = dict(zip(names, (BLUE, VERMILLION, GREEN), strict=False))  # at most three: auto, mpi and shared
    end = max(sum(outcomes[0].buckets), *map(_place, outcomes))
    notes: list[Any] = []
    for name in names:
        own, colour = [each for each in outcomes if each.variant.transport == name], colours[name]
        label = _in_legend(own[-1])
        if name in predicted:
            at, shown_ms = _steps(predicted[name], end)
            axes.plot(at, shown_ms, color=colour, drawstyle="steps-post", alpha=0.6, label=f"{label}: cost model")
        notes += _draw_points(axes, own, figures, colour, f"{label}: measured")
    return notes


def _in_legend(outcome: Outcome) -> str:
    """Return the transport asked for, and the one that carried the gradients where that is another."""
    asked = outcome.variant.transport
    return asked if outcome.moved_by == asked else f"{asked} ({outcome.moved_by})"


def _draw_points(axes: Any, outcomes: Sequence[Outcome], figures: Figures, colour: str, label: str) -> list[Any]:
    notes: list[Any] = []
    for outcome in outcomes:
        found = figures(outcome).scaled(1e3)
        if not np.isfinite(found.median):  # not measured: auto had not decided
            continue
        below = above = 0.0
        if found.low is not None and found.high is not None:
            below, above = found.median - found.low, found.high - found.median
        at = _place(outcome)
        axes.errorbar(
            [at], [found.median], [[below], [above]], color=colour, capsize=4, linestyle="none",
            marker="^" if outcome.variant.overlap else "o", label=None if notes else label,
        )  # fmt: skip
        text, place = f"{outcome.variant.name} {format_number(found.median)}", (at, found.median)
        notes.append(axes.annotate(text, place, (6, 4), textcoords="offset points", fontsize=8))
    return notes


def _separate(figure: Any, notes: Sequence[Any]) -> None:
    """Move labels up until none overlaps with another."""
    figure.draw_without_rendering()
    placed: list[Any] = []
    for note in sorted(notes, key=lambda note: note.xy[1]):
        box, lift = note.get_window_extent(), 0.0
        while any(box.translated(0, lift).overlaps(other) for other in placed):
            lift += 1.0
        placed.append(box.translated(0, lift))
        right, up = note.xyann
        note.xyann = (right, up + lift * 72 / figure.dpi)


def _steps(points: Sequence[tuple[int | None, float]], end: int) -> tuple[list[int], list[float]]:
    """Return the curve's places and milliseconds: a plan holds from its size up to the next."""
    at = [size or _PER_TENSOR_AT for size, _ in points]
    shown_ms = [seconds * 1e3 for _, seconds in points]
    return [*at, max(end, at[-1])], [*shown_ms, shown_ms[-1]]


def _place(outcome: Outcome) -> int:
    """Return an outcome's place on the axis of bucket sizes."""
    return outcome.bucket_size or _PER_TENSOR_AT


def _label_sizes(axes: Any) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axes.set_xscale("log", base=2)
    axes.margins(x=0.2, y=0.12)  # room for the points' names
    axes.set_ylim(bottom=0)
    _, high = axes.get_xlim()
    marks = [1 << exponent for exponent in range(10, 40, 2) if 1 << exponent <= high]
    axes.xaxis.set_major_locator(FixedLocator([_PER_TENSOR_AT, *marks]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: "per tensor" if at < 1000 else format_size(at)))
    axes.xaxis.minorticks_off()
