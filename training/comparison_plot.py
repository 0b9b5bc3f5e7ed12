"""A chart of step time by bucket size: measured points, and the cost model's curve beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clcomm.collective_cases import PreparedAllReduce
from clcomm.communicator import Communicator
from clcomm.costmodel import Fit, fit, plan_s
from clcomm.files import replacing, unwritable
from clcomm.forecast import recommend
from clcomm.intervals import METHOD
from clcomm.measure import Lane, Schedule, sizes_between, time_calls
from clcomm.units import format_size
from training.comparison import Outcome, reference_of

_SMALLEST, _FACTOR = 1 << 10, 4.0
#: Where single tensors have their place on the axis of bucket sizes.
_PER_TENSOR_AT = 1 << 8


def measure_costs(outcomes: Sequence[Outcome]) -> dict[str, Fit]:
    """Return alpha and beta of an all-reduce for each transport that was compared, fitted to calls of their own.

    Nothing else runs meanwhile: waits for ranks that compute are not in it. Sums are made as in the training. Empty in
    a world of one. Collective.
    """
    session = outcomes[0].session
    if session.comm.size == 1:
        return {}
    fold = session.trainer.sync.space_for(session.parts.model).replica.fold
    lanes = [Lane(transport, fold=fold) for transport in sorted({outcome.variant.transport for outcome in outcomes})]
    points: dict[str, list[tuple[int, float]]] = {lane.name: [] for lane in lanes}
    with Communicator(transport="mpi") as control:
        for nbytes in sizes_between(_SMALLEST, max(sum(outcomes[0].buckets), 4 * _SMALLEST), _FACTOR):
            cases = [PreparedAllReduce(lane.comm, nbytes) for lane in lanes]
            for lane, case, seconds in zip(lanes, cases, time_calls(cases, control, Schedule()), strict=True):
                points[lane.name].append((case.nbytes, float(np.median(seconds))))
    for lane in lanes:
        lane.comm.finalize()
    return {name: fit(found) for name, found in points.items()}


def curves(outcomes: Sequence[Outcome], costs: Mapping[str, Fit]) -> dict[str, list[tuple[int | None, float]]]:
    """Return for each transport the predicted seconds of a step by bucket size (None: per tensor).

    The model says what a plan's all-reduces cost; what else a step takes is one number for all plans, the median of
    what measured steps take beyond that.
    """
    if not costs:
        return {}
    rest = [
        float(np.nanmedian(o.step_s)) - plan_s(o.buckets, costs[o.variant.transport].cost.seconds)
        for o in outcomes
        if not o.variant.overlap and np.isfinite(o.step_s).any()
    ]
    rest_s = statistics.median(rest)
    tensors = reference_of(outcomes).buckets[::-1]
    return {
        name: [(c.bucket_size, rest_s + c.seconds) for c in recommend(tensors, its.cost.seconds).candidates]
        for name, its in costs.items()
    }


def draw(
    outcomes: Sequence[Outcome], predicted: Mapping[str, list[tuple[int | None, float]]], title: str, path: str
) -> None:
    """Draw the chart as a PNG file; raises ArgumentError when it can't be written. Needs matplotlib, an extra."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.grid": True, "grid.alpha": 0.3, "font.size": 10}):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        colours = {name: f"C{index}" for index, name in enumerate(sorted({o.variant.transport for o in outcomes}))}
        labels = {outcome.variant.transport: _in_legend(outcome) for outcome in outcomes}
        for name, points in predicted.items():
            at, step_ms = _steps(points, max(sum(outcomes[0].buckets), *map(_place, outcomes)))
            axes.plot(
                at, step_ms, color=colours[name], drawstyle="steps-post", alpha=0.6, label=f"{labels[name]}: cost model"
            )
        for name, colour in colours.items():
            _draw_points(
                axes, [o for o in outcomes if o.variant.transport == name], colour, f"{labels[name]}: measured"
            )
        _label(axes, title)
        try:
            with replacing(path) as file:
                figure.savefig(file, dpi=120, format="png")
        except OSError as error:
            raise unwritable("--plot", path, error) from None


def _in_legend(outcome: Outcome) -> str:
    """Return the transport that was asked for, with what carried the gradients where that is another."""
    asked = outcome.variant.transport
    return asked if outcome.moved_by == asked else f"{asked} ({outcome.moved_by})"


def _draw_points(axes: Any, outcomes: Sequence[Outcome], colour: str, label: str) -> None:
    for index, outcome in enumerate(outcomes):
        step = outcome.timing(outcome).step_s.scaled(1e3)
        below = above = 0.0
        if step.low is not None and step.high is not None:
            below, above = step.median - step.low, step.high - step.median
        at = _place(outcome)
        axes.errorbar(
            [at], [step.median], [[below], [above]], color=colour, capsize=4, linestyle="none",
            marker="^" if outcome.variant.overlap else "o",
            label=label if index == 0 else None,
        )  # fmt: skip
        axes.annotate(
            outcome.variant.name,
            (at, step.median),
            (6, -12 if index % 2 else 6),
            textcoords="offset points",
            fontsize=8,
        )


def _steps(points: Sequence[tuple[int | None, float]], end: int) -> tuple[list[int], list[float]]:
    """Return the curve's places and milliseconds: a plan holds from its size up to the next one's."""
    at = [size or _PER_TENSOR_AT for size, _ in points]
    step_ms = [seconds * 1e3 for _, seconds in points]
    return [*at, max(end, at[-1])], [*step_ms, step_ms[-1]]


def _place(outcome: Outcome) -> int:
    """Return where on the axis of bucket sizes an outcome has its place."""
    return outcome.bucket_size or _PER_TENSOR_AT


def _label(axes: Any, title: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axes.set_xscale("log", base=2)
    axes.margins(x=0.16)  # room for the points' names
    _, high = axes.get_xlim()
    marks = [1 << exponent for exponent in range(10, 40, 2) if 1 << exponent <= high]
    axes.xaxis.set_major_locator(FixedLocator([_PER_TENSOR_AT, *marks]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: "per tensor" if at < 1000 else format_size(at)))
    axes.xaxis.minorticks_off()
    axes.set_xlabel(f"bucket size; bars: {METHOD}", fontsize=8)
    axes.set_ylabel("time of a step (ms)")
    axes.set_title(title, fontsize=11)
    axes.legend()
