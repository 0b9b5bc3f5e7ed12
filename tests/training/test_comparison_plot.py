"""The comparison's chart: every variant in both panels, at its bucket size, with names that do not overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as File
from types import SimpleNamespace

import numpy as np
import pytest

from clcomm.comm.costs.model import Cost, Fit
from clcomm.insight.drawing import svg
from clcomm.insight.drawing.scene import Dot, Path, Scene, Text
from tests.drawn import texts_of
from tests.training.test_comparison import outcome
from training.comparison.outcome import Outcome
from training.comparison.plot import alone_curves, scenes
from training.comparison.variants import Variant

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


def written(scene: Scene) -> dict[str, Text]:
    """Return the notes beside points by the variant's name."""
    notes = [mark for mark in scene.marks if isinstance(mark, Text) and mark.shift == 8]
    found = {note.words.rsplit(" ", 1)[0]: note for note in notes}
    assert len(found) == len(notes)
    return found


def axis(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Return the places and the values of the ticks at the left."""
    ticks = [mark for mark in scene.marks if isinstance(mark, Text) and mark.anchor == "end"]
    return np.array([tick.y - 4 for tick in ticks]), np.array([float(tick.words) for tick in ticks])


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.05, 3.0])
def test_every_variant_is_named_once_in_each_panel_and_no_name_is_on_another(spread: float, tmp_path: File) -> None:
    drawn = outcomes(spread)
    panels = scenes(drawn, COSTS)
    assert [scene.title for scene in panels] == ["Time of a step", "A step's reductions alone"]
    svg.draw(panels, str(tmp_path / "drawn.svg"), "--plot", "a title", width=1000)
    texts_of(tmp_path / "drawn.svg")
    for scene, of in zip(panels, ("step_s", "alone_s"), strict=True):
        shown, (places, values) = written(scene), axis(scene)
        per_pixel, origin = np.polyfit(places, values, 1)
        dots = {round(mark.y, 6) for mark in scene.marks if isinstance(mark, Dot)}
        assert set(shown) == {each.variant.name for each in drawn}
        medians = [1e3 * float(np.median(getattr(each, of))) for each in drawn]
        assert sorted(origin + per_pixel * y for y in dots) == pytest.approx(sorted(set(medians)), abs=1e-4)
        for each, median in zip(drawn, medians, strict=True):
            assert float(shown[each.variant.name].words.rsplit(" ", 1)[1]) == pytest.approx(median, rel=0.01)
    names = [key.name for key in panels[1].keys]
    assert names == [f"{name} (shared): {kind}" for name in ("auto", "mpi") for kind in ("cost model", "measured")]
    curve = [mark for mark in panels[1].marks if isinstance(mark, Path) and len(mark.points) > 2][-1]
    predicted = [1e3 * seconds for _, seconds in alone_curves(drawn, COSTS)["mpi"] for _ in (0, 1)]
    assert [origin + per_pixel * y for _, y in curve.points] == pytest.approx(predicted, abs=1e-4)


def test_a_world_of_one_has_a_step_alone() -> None:
    assert [scene.title for scene in scenes(outcomes(0.1, world=1), {})] == ["Time of a step"]
