"""Stages 2 and 3 in use: gradients that programs look at, set or drop; states and checkpoints; what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, DistributedDataParallel, Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError, NonFiniteError
from clcomm.engine import Tensor
from clcomm.optim import SGD, Adam
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import MLP
from tests.helpers import one_line
from tests.numpy_models import Model
from tests.sharded_jobs import SHAPE, cpu, discrete, tiny_model
from tests.training.trainers import assert_same_bits
from tests.zero.jobs import ZeroJob, require_close
from training.options import TrainingOptions

SHARDED = pytest.mark.parametrize("stage", [2, 3])


# --- gradients ---


@SHARDED
def test_a_gradient_is_gone_once_its_unit_is_reduced(comm, stage):
    job = ZeroJob(comm, "mlp", stage)
    job.backward(0)
    assert all(parameter.grad is None for parameter in job.model.parameters())


@SHARDED
def test_a_hook_of_the_program_changes_a_gradient_before_it_is_reduced(comm, stage):
    states = []
    for each in (0, stage):
        job = ZeroJob(comm, "mlp", each, bucket_size=1)
        for parameter in job.model.parameters():

            def halve(p):
                p.grad = p.grad * 0.5

            parameter.register_post_accumulate_grad_hook(halve)
        states.append(job.run(3))
    assert_same_bits(*states)


@SHARDED
def test_gradients_that_the_program_sets_count(comm, stage):
    states = []
    for each in (0, stage):
        job = ZeroJob(comm, "mlp", each, bucket_size="2KiB")
        for number in range(3):
            rng = np.random.default_rng([number, comm.rank])
            for parameter in job.model.parameters():
                values = rng.standard_normal(parameter.shape).astype(np.float32)
                parameter.grad = Tensor(values, job.device)
            job.sync.sync_gradients(job.model)
            job.optimizer.step()
            job.optimizer.zero_grad()
        states.append(job.model.state_dict())
    assert_same_bits(*states)


@SHARDED
@pytest.mark.parametrize("way", ["optimizer", "model", "space", "one"])
def test_gradients_that_the_program_drops_leave_nothing_behind(comm, stage, way):
    states = []
    for each in (0, stage):
        job = ZeroJob(comm, "mlp", each, bucket_size="2KiB")
        job.run(1)
        job.backward(1)
        job.sync.sync_gradients(job.model)
        if way == "one":
            next(iter(job.model.parameters())).grad = None
        else:
            {"optimizer": job.optimizer, "model": job.model, "space": job.model.flat_space()}[way].zero_grad()
            job.backward(2)
            job.sync.sync_gradients(job.model)
        job.optimizer.step()
        job.model.zero_grad()
        states.append(job.run(2, 3))
    assert_same_bits(*states)


@SHARDED
def test_backwards_without_no_sync_are_added_too(comm, stage):
    job, plain = ZeroJob(comm, "mlp", stage, bucket_size="2KiB"), ZeroJob(comm, "mlp", 0)
    for each in (job, plain):
        for number in range(10):
            each.backward(2 * number, 0.5)
            each.backward(2 * number + 1, 0.5)
            each.sync.sync_gradients(each.model)
            each.optimizer.step()
            each.optimizer.zero_grad()
    require_close(job.model.state_dict(), plain.model.state_dict())


@SHARDED
def test_a_backward_of_another_model_reduces_nothing(comm, stage):
    job = ZeroJob(comm, "mlp", stage)
    other = MLP(SHAPE, 10, device=job.device, seed=1)
    begun = comm.sequence
    if comm.rank == 0:
        other(Tensor(np.ones((2, *SHAPE), np.float32), job.device)).sum().backward()
    assert comm.sequence == begun
    job.run(2)


@SHARDED
def test_a_later_optimizer_takes_over(comm, stage):
    states = []
    for each in (0, stage):
        job = ZeroJob(comm, "mlp", each, bucket_size="2KiB")
        job.run(2)
        optimizer = SGD(job.model, 0.05)
        job.optimizer = DistributedOptimizer(optimizer, job.sync) if each else optimizer
        states.append(job.run(3, 2))
    assert_same_bits(*states)


@SHARDED
def test_an_optimizer_may_be_made_after_the_broadcast(comm, stage):
    states = []
    for each in (0, stage):
        device = cpu()
        model = MLP(SHAPE, 10, device=device, seed=comm.rank)
        ddp = DistributedDataParallel(model, comm, zero=each, bucket_size="2KiB")
        optimizer = SGD(ddp.parameters(), 0.05, momentum=0.9)
        optimizer = DistributedOptimizer(optimizer, ddp.synchronizer) if each else optimizer
        for number in range(4):
            rng = np.random.default_rng([number, comm.rank])
            ddp(Tensor(rng.standard_normal((3, *SHAPE)).astype(np.float32), device)).sum().backward()
            ddp.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()
        states.append(ddp.state_dict())
    assert_same_bits(*states)


@SHARDED
def test_nan_names_the_parameter_and_the_rank(comm, stage):
    job = ZeroJob(comm, "mlp", stage, check_finite=True)
    job.run(1)
    culprit = comm.size - 1
    bad = np.inf if comm.rank == culprit else 1.0
    job.model(Tensor(np.full((3, *SHAPE), bad, np.float32), job.device)).sum().backward()
    with pytest.raises(NonFiniteError, match=rf"has \d+ NaN and \d+ Inf on rank {culprit}"):
        job.optimizer.step()


# --- values and states ---


@SHARDED
@pytest.mark.parametrize("make_device", [cpu, discrete])
def test_values_that_all_ranks_set_are_the_models(comm, stage, make_device):
    job = ZeroJob(comm, "gpt", stage, make_device, bucket_size="1KiB")
    job.run(1)
    other = {name: value + 1 for name, value in job.model.state_dict().items()}
    comm.barrier()  # all have read what ranks with memory in common write now
    job.model.load_state_dict(other)
    comm.barrier()
    assert_same_bits(job.model.state_dict(), other)
    job.sync.broadcast_parameters(job.model)
    assert_same_bits(job.model.state_dict(), other)
    with job.sync.full_parameters(job.model):
        if comm.rank == 0:  # alone, as reading moves nothing
            assert_same_bits(job.model.state_dict(), other)
    job.run(1)


@SHARDED
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_training_goes_on_in_any_stage_on_any_ranks(comm, tmp_path, stage, transport):
    """Saved by all ranks, resumed plain, in each stage, and by fewer ranks: the same as plain from there."""
    job = ZeroJob(comm, "mlp", stage, bucket_size="2KiB")
    job.run(2)
    parameters, state = job.model.state_dict(), job.optimizer.state_dict()
    mpi = comm.comm
    for ranks in {1, comm.size} if mpi is None else {1, 2, comm.size}:
        part = None if mpi is None else mpi.Split(comm.rank // ranks, comm.rank)
        if part is not None and part.Get_size() != ranks:
            part.Free()
            continue
        with Communicator(part, transport=transport if ranks > 1 else "auto") as fewer:
            states = []
            for each in (0, 1, 2, 3):
                resumed = ZeroJob(fewer, "mlp", each, bucket_size="3KiB")
                resumed.model.load_state_dict(parameters)
                resumed.optimizer.load_state_dict(state)
                states.append((resumed.run(2, 7), resumed.optimizer.state_dict()))
            for each in states[1:]:
                assert_same_bits(each[0], states[0][0])
                assert_same_bits(each[1], states[0][1])
        if part is not None:
            part.Free()


# --- what is refused ---


@SHARDED
def test_weights_are_refused(comm, stage):
    job = ZeroJob(comm, "mlp", stage)
    for refused in (
        lambda: job.sync.sync_gradients(job.model, samples=3),
        lambda: job.sync.join(job.model, lambda: None).__enter__(),
    ):
        with pytest.raises(ArgumentError) as caught:
            refused()
        assert one_line(caught).startswith(f"samples: expected None with zero={stage}, which reduces gradients during")
    job.run(1)


@pytest.mark.parametrize("value", [0, 4, -1, True, "2", None])
def test_stages_that_do_not_exist_are_refused(value):
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        Synchronizer(comm, zero=value)
    assert one_line(caught) == f"zero: expected a stage of ZeRO, 1, 2 or 3, got {value!r}"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compression": "fp16"}, "sync: expected one without compression for a sharded update, got fp16"),
        ({"algorithm": "ring"}, "sync: expected one without compression for a sharded update, got "),
        ({"overlap": True}, "sync: expected one without overlap for a sharded update, got overlap=True"),
        ({"split_tensors": True}, "split_tensors: expected False with zero=2, which moves whole tensors, got True"),
    ],
)
def test_options_that_do_not_go_together_are_refused(comm, options, told):
    with pytest.raises(ArgumentError) as caught:
        ZeroJob(comm, "mlp", 2, **options)
    assert one_line(caught).startswith(told)


@SHARDED
def test_what_comes_too_late_or_from_elsewhere_is_refused(stage):
    with Communicator(transport="solo") as comm:
        model = tiny_model(0)
        sync = Synchronizer(comm, zero=stage)
        optimizer = DistributedOptimizer(SGD(model, 0.1), sync)
        with pytest.raises(ArgumentError, match="call broadcast_parameters"):
            optimizer.step()
        with pytest.raises(ArgumentError, match="memory: expected a step before"):
            optimizer.memory()
        model(Tensor(np.ones((2, 3), np.float32))).sum().backward()
        with pytest.raises(ArgumentError, match="gradients: expected none when they are to be sharded"):
            sync.broadcast_parameters(model)
        model.zero_grad()
        sync.broadcast_parameters(model)
        with pytest.raises(ArgumentError, match="step its DistributedOptimizer"):
            SGD(model, 0.1).step()
        with pytest.raises(ArgumentError, match="step its DistributedOptimizer"):
            optimizer.optimizer.step()
        with pytest.raises(ArgumentError, match="expected its trainable parameters and its Synchronizer to stay"):
            Synchronizer(comm).broadcast_parameters(model)


@SHARDED
def test_no_reductions_are_measured_alone(comm, stage):
    job = ZeroJob(comm, "mlp", stage)
    with pytest.raises(ArgumentError, match="expected one whose gradients are reduced in buckets"):
        job.sync.models.of(job.model).reductions()
    with pytest.raises(ArgumentError, match="hook: expected None with a DistributedOptimizer"):
        job.sync.register_comm_hook(lambda *args: None)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_different_stages_are_an_error_on_all(several):
    with pytest.raises(MismatchError, match=r"'zero 2' on rank.* 0.*, 'zero 3' on rank.* 1"):
        ZeroJob(several, "mlp", 2 + several.rank % 2)


def test_other_libraries_models_are_refused(comm):
    with pytest.raises(ArgumentError) as caught:
        DistributedDataParallel(Model([("w", np.zeros(3, np.float32))]), comm, zero=2)
    assert one_line(caught).startswith("zero: expected 0 for other libraries' models")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("option", "name", "refused_by"),
    [
        ({"overlap": "on"}, "--overlap on", (1, 2, 3)),
        ({"compression": "fp16"}, "--compression", (1, 2, 3)),
        ({"no_bucketing": True}, "--no-bucketing", (1,)),
        ({"first_bucket_size": "64KiB"}, "--first-bucket-size", (1,)),
        ({"split_tensors": True}, "--split-tensors", (1, 2, 3)),
        ({"uneven_inputs": "join"}, "--uneven-inputs join", (2, 3)),
    ],
)
def test_options_of_a_job(stage, option, name, refused_by):
    if stage not in refused_by:
        assert TrainingOptions(zero=stage, **option).zero_stage == stage
        return
    with pytest.raises(ArgumentError) as caught:
        TrainingOptions(zero=stage, **option)
    assert one_line(caught) == f"--zero {stage}: expected no {name} with it; use one of the two"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bucket_size", [1, "1MiB"])
@pytest.mark.parametrize("make", [lambda model: SGD(model, 0.1, momentum=0.9), lambda model: Adam(model, 0.1)])
def test_more_ranks_than_blocks_leaves_some_without_a_part(comm, stage, bucket_size, make):
    rows = []
    for each in (0, stage):
        model = tiny_model(comm.rank)
        sync = Synchronizer(comm, zero=each or 1, bucket_size=bucket_size)
        optimizer = DistributedOptimizer(make(model), sync) if each else make(model)
        sync.broadcast_parameters(model)
        for number in range(3):
            model(Tensor(np.full((2, 3), number + comm.rank, np.float32))).sum().backward()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        rows.append((model.state_dict(), optimizer.state_dict()))
    assert_same_bits(rows[0][0], rows[1][0])
    assert_same_bits(rows[0][1], rows[1][1])
