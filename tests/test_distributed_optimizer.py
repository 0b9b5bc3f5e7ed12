"""The sharded update: the plain optimizer's bits on any number of ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest

from clcomm import Synchronizer, clip_grad_norm
from clcomm.engine import Tensor
from clcomm.optim import SGD, Adam
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import MLP, ConvNet
from tests.sharded_jobs import KINDS, Job, discrete, tiny_model
from tests.training.trainers import assert_same_bits


@pytest.mark.parametrize(
    ("kind", "model"), [*((kind, MLP) for kind in KINDS), ("momentum", ConvNet), ("adam", ConvNet)]
)
def test_parameters_have_the_plain_optimizers_bits(comm, kind, model):
    plain, sharded = Job(comm, kind, sharded=False, model=model), Job(comm, kind, model=model)
    assert_same_bits(sharded.run(3), plain.run(3))
    sharded.optimizer.lr = plain.optimizer.lr = 1e-3
    assert_same_bits(sharded.run(2, 3, micro_batches=2), plain.run(2, 3, micro_batches=2))
    assert sharded.optimizer.steps == 5 and sharded.optimizer.lr == 1e-3
    sharded.sync.check_replicas(sharded.model)


def test_a_device_with_memory_of_its_own(comm):
    plain, sharded = (Job(comm, "adam", each, make_device=discrete) for each in (False, True))
    assert_same_bits(sharded.run(4), plain.run(4))


def test_traffic_is_one_reduce_scatter_and_one_all_gather_a_step(comm):
    job = Job(comm)
    comm.stats.reset()
    job.run(5)
    nbytes = job.model.flat_space().layout.nbytes
    for operation, label in (("reduce_scatter", "gradients"), ("all_gather", "parameters")):
        total = comm.stats.total(operation, label)
        assert (total["calls"], total["bytes"]) == (5, 5 * nbytes)
    assert comm.stats.total("all_reduce")["calls"] == 0


def test_all_gradients_are_one_bucket_before_the_first_step_and_after_it(comm):
    job = Job(comm, bucket_size="1KiB", first_bucket_size=16, split_tensors=True)
    layout = job.model.flat_space().layout
    for _ in range(2):
        (bucket,) = job.sync.bucket_plan(job.model)
        assert (bucket.ranges, bucket.nbytes) == (layout.ranges, layout.nbytes)
        job.run(1)


@pytest.mark.mpi(min_size=2)
def test_parameters_are_one_memory_of_the_ranks_where_they_share_any(auto):
    job = Job(auto)
    job.run(1)
    assert auto.is_common(job.sync.models.space_of(job.model.flat_space()).arrays.params)
    first = job.model.state_dict()
    auto.barrier()
    if auto.rank == auto.size - 1:
        job.model.load_state_dict({name: value + 1 for name, value in first.items()})
    auto.barrier()
    assert_same_bits(job.model.state_dict(), {name: value + 1 for name, value in first.items()})


def test_a_missing_gradient_counts_as_zero(comm):
    results = []
    for sharded in (False, True):
        job = Job(comm, "adam", sharded)
        if comm.rank == comm.size - 1 and comm.size > 1:
            job.sync.sync_gradients(job.model)
            job.optimizer.step()
            job.optimizer.zero_grad()
        else:
            job.step(0)
        results.append(job.run(1, 1))
    assert_same_bits(*results)


def test_what_auto_asks_for_is_decided_at_once_as_there_are_no_buckets(comm):
    job = Job(comm, bucket_size="auto", overlap="auto")
    DistributedOptimizer(SGD(tiny_model(0), 0.1), job.sync)  # of another model: told once
    job.run(2)
    assert [str(decision) for decision in job.sync.decisions()] == [
        "overlap: off, chosen at step 0 without measuring: a sharded update has no buckets",
        "bucket_size: none, chosen at step 0 without measuring: a sharded update has no buckets",
    ]
    assert Job(comm).sync.decisions() == Job(comm, use_bucketing=False, bucket_size="auto").sync.decisions() == ()


def test_steps_left_out_after_clipping_leave_nothing_behind(comm):
    """Who skips steps whose norm is too large goes on with the next batch's gradients."""
    results = []
    for sharded in (False, True):
        job, norms = Job(comm, "adam", sharded), []
        for number in range(4):
            job.backward(number)
            if number != 2 or not sharded:  # there it may be left out, as the step averages
                job.sync.sync_gradients(job.model)
            norms.append(clip_grad_norm(job.sync, job.model, 0.3))
            if number in (1, 2):
                (job.optimizer if number == 1 else job.model.flat_space()).zero_grad()
                continue
            job.optimizer.step()
            job.optimizer.zero_grad()
        results.append((norms, job.model.state_dict()))
    assert results[0][0] == results[1][0]
    assert_same_bits(results[0][1], results[1][1])


def test_ranks_without_a_part_clip_too(comm):
    results = []
    for sharded in (False, True):
        model, sync = tiny_model(comm.rank), Synchronizer(comm)
        optimizer = Adam(model, 0.1)
        optimizer = DistributedOptimizer(optimizer, sync) if sharded else optimizer
        sync.broadcast_parameters(model)
        for number in range(3):
            model(Tensor(np.full((2, 3), number + comm.rank + 1, np.float32))).sum().backward()
            sync.sync_gradients(model)
            assert clip_grad_norm(sync, model, 0.5) > 0.5
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    assert_same_bits(*results)


@pytest.mark.mpi(min_size=2)
def test_between_clipping_and_step_the_parameters_are_the_old_ones(auto):
    job = Job(auto)
    before = job.run(1)
    job.backward(1)
    job.sync.sync_gradients(job.model)
    clip_grad_norm(job.sync, job.model, 0.3)
    if auto.rank == 0:
        time.sleep(0.05)  # the others are in their step by now
        assert_same_bits(job.model.state_dict(), before)
    job.optimizer.step()
    assert any(after.tobytes() != before[name].tobytes() for name, after in job.model.state_dict().items())


def test_a_models_latest_sharded_update_is_the_one_that_counts(comm):
    results = []
    for sharded in (False, True):
        job = Job(comm, "momentum", sharded)
        job.run(2)
        optimizer = Adam(job.model, 1e-3)
        job.optimizer = DistributedOptimizer(optimizer, job.sync) if sharded else optimizer
        for number in (2, 3):
            job.backward(number)
            job.sync.sync_gradients(job.model, samples=1 + comm.rank)
            clip_grad_norm(job.sync, job.model, 0.3)
            job.optimizer.step()
            job.optimizer.zero_grad()
        results.append(job.model.state_dict())
    assert_same_bits(*results)
