"""What a sharded update refuses, on every rank alike."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError, NonFiniteError
from clcomm.engine import Tensor
from clcomm.optim import SGD, Adam, Optimizer
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models import MLP
from tests.helpers import one_line
from tests.sharded_jobs import SHAPE, Job, cpu, tiny_model
from training.options import TrainingOptions


def test_other_engines_have_no_such_option():
    with pytest.raises(ArgumentError, match="--sharded-optimizer: needs --engine native, got torch"):
        TrainingOptions(sharded_optimizer=True, engine="torch")


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"overlap": "on"}, "--overlap on"),
        ({"compression": "fp16"}, "--compression"),
        ({"no_bucketing": True}, "--no-bucketing"),
        ({"first_bucket_size": "64KiB"}, "--first-bucket-size"),
        ({"split_tensors": True}, "--split-tensors"),
    ],
)
def test_options_of_buckets_are_refused(option, name):
    with pytest.raises(ArgumentError) as caught:
        TrainingOptions(sharded_optimizer=True, **option)
    assert one_line(caught) == f"--sharded-optimizer: expected no {name} with it; use one of the two"


EXPECTED = "expected one of clcomm.optim, whose state can be divided between ranks"


def test_other_optimizers_are_refused():
    assert refusal_of(None) == f"optimizer: {EXPECTED}, got builtins.NoneType"


def test_another_librarys_optimizer_is_told_from_ours_of_the_same_name():
    torch = pytest.importorskip("torch")
    theirs = torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), 0.1)
    assert refusal_of(theirs).endswith(f"{EXPECTED}, got torch.optim.sgd.SGD")


def refusal_of(optimizer):
    with Communicator(transport="solo") as comm, pytest.raises(ArgumentError) as caught:
        DistributedOptimizer(optimizer, Synchronizer(comm))
    return one_line(caught)


def test_a_model_that_the_synchronizer_has_not_seen_is_refused():
    with Communicator(transport="solo") as comm:
        optimizer = DistributedOptimizer(SGD(tiny_model(0), 0.1), Synchronizer(comm))
        with pytest.raises(ArgumentError) as caught:
            optimizer.step()
    assert "call broadcast_parameters(model) first" in one_line(caught)


def test_two_synchronizers_for_one_model_are_refused():
    with Communicator(transport="solo") as comm:
        job = Job(comm)
        job.run(1)
        Synchronizer(comm).broadcast_parameters(job.model)
        with pytest.raises(ArgumentError) as caught:
            job.run(1)
    assert "another Synchronizer moved its model's memory" in one_line(caught)


def test_a_hook_is_refused_in_either_order():
    def hook(gradient, comm, out, bucket):
        raise AssertionError("nothing calls it")

    with Communicator(transport="solo") as comm:
        job = Job(comm)
        with pytest.raises(ArgumentError) as caught:
            job.sync.register_comm_hook(hook)
        assert one_line(caught).startswith("hook: expected None with a DistributedOptimizer, which reduces without")
        job.sync.register_comm_hook(None)
        job.run(1)
        plain = Job(comm, sharded=False)
        plain.sync.register_comm_hook(hook)
        with pytest.raises(ArgumentError, match="sync: expected one without compression for a sharded update"):
            DistributedOptimizer(plain.optimizer, plain.sync)


@pytest.mark.parametrize("bounds", [(-128, 0), (0, 1 << 40), (256, 128), (0, 100)])
def test_bad_ranges_are_refused(bounds):
    with pytest.raises(ArgumentError) as caught:
        SGD(MLP(SHAPE, 10, device=cpu()), 0.1).restrict(*bounds)
    assert one_line(caught).startswith("range: expected multiples of 128 within [0, ")


def test_a_restricted_optimizer_takes_no_step_of_its_own_and_no_other_range():
    optimizer: Optimizer = Adam(MLP(SHAPE, 10, device=cpu()), 0.1)
    optimizer.restrict(0, 256)
    with pytest.raises(ArgumentError) as caught:
        optimizer.step()
    assert "step its DistributedOptimizer" in one_line(caught)
    optimizer.state_dict()
    with pytest.raises(ArgumentError) as caught:
        optimizer.restrict(0, 128)
    assert "before the first step" in one_line(caught)


@pytest.mark.mpi(min_size=2)
def test_other_settings_on_some_rank_are_an_error_on_every_rank(several):
    job = Job(several)
    job.optimizer.lr = 0.1 + several.rank
    with pytest.raises(MismatchError) as caught:
        job.run(1)
    assert "sharded update: expected the same on every rank, but entry 2 is 'lr 0.1' on rank 0" in one_line(caught)


@pytest.mark.mpi(min_size=2)
def test_settings_that_drift_apart_are_found_at_the_next_update(several):
    """Parameters would not show it, where each part is updated once."""
    job = Job(several, "adam")
    job.run(2)
    job.optimizer.lr = 0.1 + several.rank
    with pytest.raises(MismatchError) as caught:
        job.run(1)
    assert "optimizer: expected the same on every rank, but entry 0 is 'Adam with lr 0.1, " in one_line(caught)


@pytest.mark.mpi(min_size=2)
def test_replicas_that_differ_are_an_error_before_they_share_memory(several):
    job = Job(several)
    if several.rank == 0:
        job.model.load_state_dict({name: value + 1 for name, value in job.model.state_dict().items()})
    with pytest.raises(MismatchError, match="replicas: expected the same parameters on every rank"):
        job.run(1)


def test_freezing_after_the_first_step_is_noticed():
    with Communicator(transport="solo") as comm:
        job = Job(comm)
        job.run(1)
        next(job.model.parameters()).requires_grad = False
        with pytest.raises(ArgumentError) as caught:
            job.run(1, 1)
    assert "expected requires_grad to stay as it was at the first synchronisation" in one_line(caught)


def test_nan_ends_the_step_on_every_rank(comm):
    job = Job(comm, check_finite=True)
    job.run(1)
    culprit = comm.size - 1
    if comm.rank == culprit:
        job.model(Tensor(np.full((3, *SHAPE), np.inf, np.float32), job.device)).sum().backward()
    with pytest.raises(NonFiniteError, match=rf"has \d+ NaN and \d+ Inf on rank {culprit}"):
        job.optimizer.step()
