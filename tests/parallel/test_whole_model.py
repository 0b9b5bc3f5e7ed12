"""What depends on all of a model's gradients is one on all ranks that have a part of it: norms and skipped steps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clcomm import DistributedDataParallel, Mesh, clip_grad_norm
from clcomm.base.errors import ArgumentError
from clcomm.optim import SGD
from clcomm.parallel import parallelize_module
from clcomm.parallel.loss_scaling import GradScaler
from clcomm.parallel.pipeline import Pipeline
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import one_line
from tests.parallel.pipeline.cases import CASES, GPT_PLAN, bits, tensor

pytestmark = pytest.mark.mpi(min_size=2)

CASE, PARTS = CASES["gpt"], 2  # token embedding and head are tied, on the first and the last stage


def meshes(ranks: int) -> list[dict[str, int]]:
    """Return those with stages, and two ranks for each other axis."""
    found = [{"dp": 1, "tp": 1, "pp": ranks}]
    if ranks % 2 == 0:
        found += [{"dp": 1, "tp": 2, "pp": ranks // 2}, {"dp": 2, "tp": 1, "pp": ranks // 2}]
    return found + [{"dp": 2, "tp": 2, "pp": ranks // 4}] * (ranks % 8 == 0)


class Training:
    """The stages of a model on a mesh, with an optimizer whose update is sharded with zero=1."""

    def __init__(self, comm, axes: dict[str, int], zero: int):
        self.mesh, self.scaler = Mesh(comm, **axes), None
        model = CASE.make()
        if axes["tp"] > 1:
            model = parallelize_module(model, self.mesh["tp"], GPT_PLAN)
        self.pipeline = Pipeline(model, self.mesh["pp"], loss=self._loss, micro_batches=PARTS)
        self.ddp = DistributedDataParallel(self.pipeline.module, self.mesh["dp"], zero=zero)
        optimizer = SGD(self.pipeline.module, 0.1)
        self.optimizer = DistributedOptimizer(optimizer, self.ddp.synchronizer) if zero else optimizer

    def _loss(self, output, target):
        loss = CASE.loss(output, target)
        return loss if self.scaler is None else self.scaler.scale(loss)

    def backward(self, step: int) -> None:
        self.pipeline.step(*CASE.batch_of(step, PARTS, self.mesh["dp"].rank))

    def close(self) -> None:
        self.mesh.close()


def norm_alone(replicas: int) -> float:
    model = CASE.make()
    for replica in range(replicas):
        x, y = CASE.batch_of(0, PARTS, replica)
        CASE.loss(model(tensor(x)), tensor(y)).backward(1 / replicas)
    return math.sqrt(sum((each.grad.numpy().astype(np.float64) ** 2).sum() for each in model.parameters()))


@pytest.mark.parametrize("zero", [0, 1])
def test_every_way_to_clip_uses_the_norm_of_the_whole_model(auto, zero):
    for axes in meshes(auto.size):
        training = Training(auto, axes, zero)
        expected, norms = norm_alone(axes["dp"]), []
        for clip in (
            training.pipeline.clip_grad_norm,
            training.ddp.clip_grad_norm,
            lambda largest, own=training: clip_grad_norm(own.ddp.synchronizer, own.ddp.module, largest),
        ):
            training.optimizer.zero_grad()
            training.backward(0)
            training.ddp.finish_grad_sync()
            norms += [clip(expected / 2), clip(1e9)]
        assert norms[::2] == pytest.approx([expected] * 3, rel=1e-4), axes
        assert norms[1::2] == pytest.approx([expected / 2] * 3, rel=1e-4), axes
        assert auto.all_gather_object(norms) == [norms] * auto.size
        training.close()


@pytest.mark.parametrize("zero", [0, 1])
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(auto, zero):
    for axes in meshes(auto.size):
        training = Training(auto, axes, zero)
        scaler = training.scaler = GradScaler(training.ddp.synchronizer, 16.0)  # of one stage's data-parallel ranks
        taken, states = [], [bits(training.pipeline.state_dict())]
        for step in range(4):
            training.backward(step)
            if step % 2 and auto.rank == step * 7 % auto.size:
                gradient = next(training.pipeline.parameters()).grad
                gradient.copy_from(np.full(gradient.shape, np.inf))
            training.ddp.finish_grad_sync()
            if step:
                scaler.unscale_(training.optimizer)
                training.pipeline.clip_grad_norm(1e9)
            taken.append(scaler.step(training.optimizer))
            scaler.update()
            training.optimizer.zero_grad()
            states.append(bits(training.pipeline.state_dict()))
        assert taken == [True, False, True, False], axes
        assert states[1] == states[2] and states[3] == states[4] and len({str(each) for each in states}) == 3
        assert scaler.get_scale() == 4.0
        everyone = auto.all_gather_object((taken, states, scaler.get_scale()))
        assert all(each == everyone[0] for each in everyone), axes
        training.close()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("zero", [2, 3])
def test_tied_stages_refuse_gradients_that_are_averaged_in_backward(auto, zero):
    training = Training(auto, {"dp": 2, "tp": 1, "pp": auto.size // 2}, zero)
    training.ddp.synchronizer.broadcast_parameters(training.pipeline.module)
    with pytest.raises(ArgumentError) as caught:
        training.backward(0)
    text = one_line(caught)
    assert text.startswith("zero: expected 0 or 1 with parameters that several stages share")
    stages = training.mesh["pp"]  # of one replica, which the text names
    assert stages.all_gather_object(text) == [text] * stages.size
    training.close()
