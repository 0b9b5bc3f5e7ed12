"""Pipelines whose stages are divided between tensor-parallel ranks equal one rank on the same samples."""

from __future__ import annotations

import pytest

from clcomm import Mesh
from clcomm.optim import SGD
from clcomm.parallel import ColumnParallel, HeadsParallel, RowParallel, parallelize_module
from clcomm.parallel.pipeline import Pipeline
from tests.parallel.pipeline.cases import CASES, STEPS, bits, require_close, trained_alone

PLANS = {
    "mlp": {
        **{str(number): ColumnParallel() for number in (0, 4, 8, 12)},
        **{str(number): RowParallel() for number in (2, 6, 10, 14)},
    },
    "gpt": {
        "transformer.h.*.attn": HeadsParallel("heads"),
        "transformer.h.*.attn.c_attn": ColumnParallel(sections=3),
        "transformer.h.*.mlp.c_fc": ColumnParallel(),
        "transformer.h.*.*.c_proj": RowParallel(),
    },
}


@pytest.mark.sampled(2)
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("name", PLANS)
def test_divided_stages_equal_one_rank_on_the_same_samples(auto, name, schedule):
    """A ColumnParallel layer and the RowParallel one behind it are in one stage."""
    mesh, case = Mesh(auto, pp=-1, tp=2), CASES[name]
    micro_batches = 2 * mesh["pp"].size
    model = parallelize_module(case.make(), mesh["tp"], PLANS[name])
    cut = "layers" if name == "gpt" else [4 * stage for stage in range(_stages(mesh, schedule))]
    pipeline = Pipeline(model, mesh, loss=case.loss, micro_batches=micro_batches, schedule=schedule, cut=cut)
    optimizer = SGD(pipeline.module, 0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        losses.append(pipeline.step(*case.batch_of(step, 2 * micro_batches)))
        optimizer.step()
        optimizer.zero_grad()
    expected, expected_losses = trained_alone(case, 2 * micro_batches)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    state = pipeline.state_dict()
    require_close(state, expected)
    assert all(theirs == bits(state) for theirs in auto.all_gather_object(bits(state)))


def _stages(mesh: Mesh, schedule: str) -> int:
    return mesh["pp"].size * (2 if schedule == "interleaved" else 1)
