"""Replicas that differ: how they are reported, and made alike again."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.engine import Tensor
from clcomm.optim import SGD, Adam
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from clcomm.sync.divergence import describe
from models import MLP
from tests.helpers import cpu_device, one_line
from tests.numpy_models import set_gradients, small_model

SHAPE = (1, 4, 4)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ([[1, 1, 2, 1], [5, 5, 5, 5]], "'a' on rank 2 differs from ranks 0, 1 and 3"),
        (
            [[1, 2, 3, 1, 1], [4, 4, 6, 4, 4]],
            "'a' on ranks 1 and 2 differs from ranks 0, 3 and 4, 'b' on rank 2",
        ),
        ([[1, 2], [5, 5]], "'a' differs between ranks 0 and 1"),
        ([[5, 5, 5, 5], [1, 2, 2, 1]], "'b' differs between ranks 0, 1, 2 and 3"),
    ],
)
def test_what_differs_is_named_with_its_ranks(columns, text):
    by_slot = np.array(columns, np.uint64).T
    assert describe("ab", by_slot).startswith(f"replicas: expected the same parameters on every rank, but {text}")


def test_few_of_many_are_named():
    by_slot = np.zeros((3, 9), np.uint64)
    by_slot[1] = 1
    assert describe("abcdefghi", by_slot).endswith("'d' on rank 1 differs from ranks 0 and 2, 5 more parameters differ")


@pytest.mark.parametrize("value", ["ignore", None])
def test_unknown_ways_to_react_are_refused(comm, value):
    with pytest.raises(ArgumentError) as caught:
        Synchronizer(comm, on_divergence=value)
    assert one_line(caught) == f"on_divergence: expected raise or rebroadcast, got {value!r}"


def flip(model, name="b1") -> None:
    model[name].data.view(np.uint32)[2] ^= 1 << 20


@pytest.mark.parametrize("place", [0, 1, -1])
def test_the_majoritys_parameters_are_sent_and_reported_once(several, caplog, place):
    model = small_model(several.rank)
    sync = Synchronizer(several, check_replicas_every=2, on_divergence="rebroadcast")
    sync.broadcast_parameters(model)
    before = model.bits()
    culprit = range(several.size)[place] if several.size > 2 else 1  # of two ranks the lower one counts as right
    others = [rank for rank in range(several.size) if rank != culprit]
    with caplog.at_level(logging.WARNING, logger="clcomm"):
        for step in range(1, 5):
            if several.rank == culprit and step % 2:
                flip(model)
            set_gradients(model, several.rank)
            sync.sync_gradients(model)
            assert (model.bits() == before) or (several.rank == culprit and step % 2)
    told = [record.getMessage() for record in caplog.records if "replicas" in record.getMessage()]
    assert len(told) == (several.rank == 0)
    if told and several.size > 2:
        assert told[0].endswith(f"; all go on with rank {others[0]}'s")
        assert f"'b1' on rank {culprit} differs from ranks {others[0]}" in told[0]
    assert sync.guard.divergences == 2


def engine_job(comm, **options):
    device = cpu_device("cpu")
    model = MLP(SHAPE, 10, device=device, seed=comm.rank)
    sync = Synchronizer(comm, on_divergence="rebroadcast", check_replicas_every=1, **options)
    sync.broadcast_parameters(model)
    return device, model, sync


def backward(device, model, rank, step):
    images = np.random.default_rng([step, rank]).standard_normal((3, *SHAPE)).astype(np.float32)
    model(Tensor(images, device)).sum().backward()


def test_the_optimizers_state_is_sent_along(several):
    device, model, sync = engine_job(several)
    optimizer = Adam(model, 1e-2)
    sync.attach_optimizer(model, optimizer)
    culprit = several.size - 1
    for step in range(4):
        backward(device, model, several.rank, step)
        if several.rank == culprit and step == 2:
            state = model.state_dict()
            model.load_state_dict({name: value + 1 for name, value in state.items()})
            lost = optimizer.state_dict()
            optimizer.load_state_dict({**lost, "mean": lost["mean"] + 1})
        sync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    everyone = several.all_gather_object([a.tobytes() for a in optimizer.state_dict().values()])
    assert all(state == everyone[0] for state in everyone)
    sync.check_replicas(model)
    assert sync.guard.divergences == 1


def test_a_sharded_update_has_each_part_of_its_state_once(several):
    device, model, sync = engine_job(several)
    optimizer = DistributedOptimizer(SGD(model, 0.1, momentum=0.9), sync)
    sync.attach_optimizer(model, optimizer)  # must not be asked for a state by one rank alone
    for step in range(3):
        backward(device, model, several.rank, step)
        sync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    if several.rank == 0 and sync.models.space_of(model.flat_space()).adapter.flat_space.is_staged:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    sync.check_replicas(model)
    sync.guard.require_alike(sync.models.space_of(model.flat_space()))


def test_the_device_finds_a_flipped_bit(several):
    device, model, sync = engine_job(several)
    sync.guard.on_divergence = "raise"
    if several.rank == several.size - 1:
        state = {name: value.copy() for name, value in model.state_dict().items()}
        name = next(iter(state))
        state[name].view(np.uint32).reshape(-1)[5] ^= 1
        model.load_state_dict(state)
    backward(device, model, several.rank, 0)
    with pytest.raises(MismatchError) as caught:
        sync.sync_gradients(model)
    assert f"but {next(iter(model.state_dict()))!r} " in one_line(caught)
