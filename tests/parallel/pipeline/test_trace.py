"""A pipeline's timeline: a slice for each forward and backward, with stage and micro-batch, and each message."""

from __future__ import annotations

import pytest

from clcomm import Mesh
from clcomm.base.schedules.pipeline import Action
from clcomm.insight.trace import Trace
from clcomm.parallel.pipeline import Pipeline
from tests.parallel.pipeline.cases import CASES
from tests.trace import rules

pytestmark = pytest.mark.mpi(min_size=1)
STEPS = 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_every_action_is_drawn_where_its_rank_ran_it(auto, tmp_path, schedule):
    mesh, case = Mesh(auto, pp=-1), CASES["mlp"]
    pipeline = Pipeline(case.make(), mesh, loss=case.loss, micro_batches=2 * auto.size, schedule=schedule)
    batch = case.batch_of(0, 4 * auto.size)
    pipeline.step(*batch)
    path = auto.broadcast_object(tmp_path / "run.json")
    with Trace(auto, path):
        for _ in range(STEPS):
            with auto.phase("step"):
                pipeline.step(*batch)
    table = {}
    if auto.rank == 0:
        trace = rules.load(path)
        for rank in range(auto.size):
            drawn = [each for each in rules.on_thread(trace, "steps", rank) if each["name"] in ("forward", "backward")]
            actions = [
                Action(each["args"]["stage"], each["args"]["micro-batch"], each["name"] == "forward") for each in drawn
            ]
            assert actions == list(pipeline.schedule.actions[rank]) * STEPS
            assert all(each["args"]["label"] == f"stage {each['args']['stage']}" for each in drawn)
            last = drawn[len(drawn) // STEPS :]
            table |= dict(zip(actions[len(actions) // STEPS :], last, strict=True))
            names = [each["name"] for each in rules.on_thread(trace, "communication", rank)]
            own = range(rank, pipeline.schedule.stages, auto.size)
            activations = sum(stage < pipeline.schedule.stages - 1 for stage in own) * 2 * auto.size * STEPS
            assert names.count("send activations on pp") == activations
            received = sum(stage > 0 for stage in own) * 2 * auto.size * STEPS
            assert names.count("recv activations on pp") == received
            assert names.count("send activation gradients on pp") == received
            assert names.count("recv activation gradients on pp") == activations
        for action, each in table.items():
            for needed in pipeline.schedule.needs(action):
                assert table[needed]["ts"] + table[needed]["dur"] <= each["ts"] + 1, (needed, action)
    auto.barrier()
    bubble = pipeline.bubble()
    assert bubble.formula == pipeline.schedule.bubble and bubble.steps == STEPS + 1
    assert 0 <= bubble.measured < 1 and "by the formula" in str(bubble)
    assert len({*auto.all_gather_object(bubble)}) == 1
    pipeline.reset_times()
    assert pipeline.bubble().steps == 0 and pipeline.peak_activation_bytes == 0
