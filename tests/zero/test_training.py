"""Every stage of ZeRO trains what one rank trains on the same samples, with plain data parallelism's bits."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import MismatchError
from clcomm.engine import Linear, Module, Tensor
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.sharded_jobs import cpu, discrete
from tests.training.trainers import assert_same_bits
from tests.zero.jobs import MODELS, STAGES, ZeroJob


@pytest.mark.sampled(10)
@pytest.mark.parametrize("make_device", [cpu, discrete])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_one_backward_a_step_has_the_bits_of_plain_data_parallelism(comm, kind, stage, make_device):
    plain = ZeroJob(comm, kind, 0, make_device)
    sharded = ZeroJob(comm, kind, stage, make_device, bucket_size="4KiB")
    assert_same_bits(sharded.run(5), plain.run(5))
    assert_same_bits(sharded.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_a_backward_counts_as_zeros(comm, stage):
    if stage == 3 and comm.size > 1 and not comm.shares_memory:
        pytest.skip("a rank without a forward gathers no parameters for the others")
    results = []
    for each in (0, stage):
        job = ZeroJob(comm, "mlp", each, bucket_size="4KiB")
        for number in range(3):
            if comm.size == 1 or comm.rank != (number + 1) % comm.size:
                job.backward(number)
            job.sync.sync_gradients(job.model)
            job.optimizer.step()
            job.optimizer.zero_grad()
        results.append(job.model.state_dict())
    assert_same_bits(*results)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_failed_backward_reduces_nothing_in_the_next_one_of_another_model(auto, stage):
    job = ZeroJob(auto, "mlp", stage)

    def fail(_):
        raise KeyError("of the program")

    remove = next(job.model.parameters()).register_post_accumulate_grad_hook(fail)  # after the other layers' gradients
    with pytest.raises(KeyError):
        job.backward(0)
    remove()
    begun = auto.sequence
    Linear(3, 2, device=job.device)(Tensor(np.ones((1, 3), np.float32), job.device)).backward(
        Tensor(np.ones((1, 2), np.float32), job.device)
    )
    assert auto.sequence == begun
    job.optimizer.zero_grad()
    job.step(0)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_without_a_backward_waits_for_the_update_before(auto, monkeypatch, stage):
    job = ZeroJob(auto, "mlp", stage)
    job.backward(0)
    job.sync.sync_gradients(job.model)
    job.optimizer.step()
    values, seen = job.optimizer._shard.values, []
    before = values.copy()
    monkeypatch.setattr(job.device, "finish", lambda: seen.append(values.copy()))
    job.optimizer.zero_grad()
    job.sync.sync_gradients(job.model)
    job.optimizer.step()
    assert before.any() and seen[0].tobytes() == before.tobytes() and not values.any()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_use_different_parameters_are_an_error_on_all_where_these_are_gathered():
    job = ZeroJob(Communicator(transport="mpi"), "mlp", 3, bucket_size=1)
    job.run(3)
    with pytest.raises(MismatchError, match="all_gather 'parameters'"):
        if job.comm.rank:
            job.backward(3)
        job.sync.sync_gradients(job.model)
        job.optimizer.step()


class Branches(Module):
    """Layers of which a forward uses those that it is told to."""

    def __init__(self, device, seed):
        rng = np.random.default_rng(seed)
        self.layers = [Linear(6, 6, device=device) for _ in range(4)]
        for index, layer in enumerate(self.layers):
            setattr(self, f"layer{index}", layer)
            for parameter in layer.parameters():
                parameter.copy_from(rng.standard_normal(parameter.shape).astype(np.float32))

    def forward(self, x, used):
        for index in used:
            x = self.layers[index](x)
        return x


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_leave_out_different_layers_and_complete_them_in_any_order(auto, stage):
    """With stage 3 too, as ranks that share memory gather nothing."""
    if stage == 3 and auto.hosts > 1:
        pytest.skip("parameters are gathered between hosts")
    results = []
    for each in (0, stage):
        device = cpu()
        model = Branches(device, auto.rank)
        sync = Synchronizer(auto, zero=each or 1, bucket_size=1)
        optimizer = SGD(model, 0.01, momentum=0.9)
        optimizer = DistributedOptimizer(optimizer, sync) if each else optimizer
        sync.broadcast_parameters(model)
        for number in range(6):
            rng = np.random.default_rng([number, auto.rank])
            used = rng.permutation(4)[: rng.integers(1, 5)]
            x = Tensor(rng.standard_normal((2, 6)).astype(np.float32), device)
            model(x, used).sum().backward()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    assert_same_bits(*results)


# --- replays ---
