"""A pipeline's optimizer state is that of one rank, and goes on anywhere; a step's weight scales its gradients."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.optim import SGD, AdamW
from clcomm.parallel.pipeline import Pipeline
from tests.parallel.pipeline.cases import CASES, require_close, tensor


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_state_is_that_of_the_whole_model_and_goes_on_in_stages(comm, kind):
    case, make = CASES["gpt"], lambda module: kind(module, 0.01)
    alone = case.make()
    single = make(alone)
    pipelines = [Pipeline(case.make(), comm, loss=case.loss, micro_batches=2) for _ in range(2)]
    optimizers = [make(each.module) for each in pipelines]
    _train(pipelines[0], optimizers[0], case, range(3))
    for step in range(3):
        x, y = case.batch_of(step, 4)
        case.loss(alone(tensor(x)), tensor(y)).backward(0.5)
        single.step()
        single.zero_grad()
    state, expected = pipelines[0].optimizer_state_dict(optimizers[0]), single.state_dict()
    assert state.keys() == expected.keys() and state["names"].tolist() == expected["names"].tolist()
    for name in ("sizes", "places"):
        assert state[name].tolist() == expected[name].tolist()
    names = single.state_names
    require_close({name: state[name] for name in names}, {name: expected[name] for name in names})
    pipelines[1].load_state_dict(pipelines[0].state_dict())
    pipelines[1].load_optimizer_state_dict(optimizers[1], state)
    for pipeline, optimizer in zip(pipelines, optimizers, strict=True):
        _train(pipeline, optimizer, case, range(3, 5))
    one, other = (each.state_dict() for each in pipelines)
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def _train(pipeline, optimizer, case, steps) -> None:
    for step in steps:
        pipeline.step(*case.batch_of(step, 4), weight=0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.mpi(min_size=2)
def test_a_state_without_own_parameters_is_refused(comm):
    case = CASES["mlp"]
    pipeline = Pipeline(case.make(), comm, loss=case.loss, micro_batches=1)
    optimizer = SGD(pipeline.module, 0.1)
    state = pipeline.optimizer_state_dict(optimizer)
    names = np.array([f"another.{name}" for name in state["names"]])
    with pytest.raises(ArgumentError, match=r"\Astate_dict: expected the whole model's parameters, got none named \d"):
        pipeline.load_optimizer_state_dict(optimizer, {**state, "names": names})
