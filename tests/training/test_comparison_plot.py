"""The comparison's chart: every variant in both panels, at its bucket size, with names that do not overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from clcomm.costs.model import Cost, Fit
from tests.training.test_comparison import outcome
from training.comparison.outcome import Outcome
from training.comparison.plot import alone_curves, figure_of
from training.comparison.variants import Variant

pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'clcomm[plot]'")

TENSORS = (40, 5120, 512, 802_816)
COSTS = {name: Fit(Cost(alpha, 1e-9), 0.0, 0.0, ()) for name, alpha in (("auto", 1e-5), ("mpi", 1e-4))}


def outcomes(spread: float, world: int = 2) -> list[Outcome]:
    """Eight ways whose times lie as close to each other as `spread` says."""
    whole = sum(TENSORS)
    plans: dict[str, tuple[tuple[int, ...], int | str | None]] = {
        "bucketed": ((whole,), 1 << 20), "per tensor": (TENSORS, None), "64KiB": (TENSORS[:2], 1 << 16),
        "64KiB, overlap": (TENSORS[:2], 1 << 16), "auto": ((whole,), "auto"),
    }  # fmt: skip
    found = []
    for transport in ("auto", "mpi"):
        for number, (name, (plan, size)) in enumerate(plans.items()):
            each = outcome(name, plan, [5e-3 * (1 + spread * number)] * 8, size)
            variant = Variant(name if transport == "auto" else f"{name}, mpi", size, transport)
            alone = np.full(12, np.nan if world == 1 else 1e-4 * (1 + spread * number))
            result = SimpleNamespace(bucket_size=1 << 20)
            session = SimpleNamespace(comm=SimpleNamespace(size=world), trainer=None)
            found.append(replace(each, variant=variant, alone_s=alone, result=result, session=session))
    return found


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.05, 3.0])
def test_every_variant_is_named_once_in_each_panel_and_no_name_is_on_another(spread: float) -> None:
    drawn = outcomes(spread)
    figure = figure_of(drawn, COSTS, "a title")
    names = ("time of a step (ms)", "a step's reductions alone (ms)")
    assert tuple(axes.get_ylabel() for axes in figure.axes) == names
    for axes, of in zip(figure.axes, ("step_s", "alone_s"), strict=True):
        shown = {note.get_text().rsplit(" ", 1)[0]: note for note in axes.texts}
        assert set(shown) == {each.variant.name for each in drawn} and len(axes.texts) == len(drawn)
        for each in drawn:
            median = 1e3 * float(np.median(getattr(each, of)))
            assert shown[each.variant.name].xy[1] == pytest.approx(median)
            assert float(shown[each.variant.name].get_text().rsplit(" ", 1)[1]) == pytest.approx(median, rel=0.01)
        boxes = [note.get_window_extent().shrunk(0.99, 0.95) for note in axes.texts]
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    (line,) = (line for line in figure.axes[1].lines if line.get_label() == "mpi (shared): cost model")
    predicted = [1e3 * seconds for _, seconds in alone_curves(drawn, COSTS)["mpi"]]
    assert list(line.get_ydata())[:-1] == pytest.approx(predicted)


def test_a_world_of_one_has_a_step_alone() -> None:
    figure = figure_of(outcomes(0.1, world=1), {}, "a title")
    assert [axes.get_ylabel() for axes in figure.axes] == ["time of a step (ms)"]
