"""SyncBatchNorm over logical shards, which take turns: the bits of any number of ranks, and errors within a turn."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer, optim
from clcomm.base.errors import ArgumentError
from clcomm.engine import BatchNorm1d, CrossEntropyLoss, Dropout, Linear, ReLU, Replay, Sequential, Tensor, nn
from clcomm.engine.random_stream import RandomStream
from clcomm.parallel import SyncBatchNorm
from tests.helpers import one_line
from tests.shard_steps import CLASSES, INPUTS, batches, drawn_counts


def normalised(comm: Communicator, device: Any, shards: int, micro_batches: int = 1, replays: bool = False) -> str:
    """Return the hash of what a training with statistics over all shards ends with."""
    nn.manual_seed(3)
    RandomStream.of(device).seed(3, comm.rank)
    on = {"device": device}
    shared = Linear(20, 20, **on)  # has a gradient of before and after a layer's turn in backward
    model = SyncBatchNorm.convert_sync_batchnorm(
        Sequential(
            Linear(INPUTS, 20, **on), BatchNorm1d(20, **on), ReLU(), Dropout(0.3), shared, BatchNorm1d(20, **on),
            ReLU(), shared, Linear(20, CLASSES, **on),
        ),
        comm,
    )  # fmt: skip
    sync, rng = Synchronizer(comm, shards=shards), np.random.default_rng(comm.size)
    sync.broadcast_parameters(model)
    stepper = optim.Adam(model, 1e-2)
    loss_of = Replay(_loss_and_backward) if replays else _loss_and_backward
    for inputs, targets in batches(shards, 5):

        def compute(shard: int, inputs: np.ndarray = inputs, targets: np.ndarray = targets) -> None:
            for x, y in zip(
                np.split(inputs[shard], micro_batches), np.split(targets[shard], micro_batches), strict=True
            ):
                loss_of(model, Tensor(x, device), Tensor(y, device))

        sync.run_shards(model, compute)
        sync.sync_gradients(model)
        stepper.step()
        stepper.zero_grad()
        sync.deal_shards(drawn_counts(rng, comm.size, shards))
    sync.check_replicas(model)
    state = {**model.state_dict(), **stepper.state_dict()}
    return hashlib.sha256(b"".join(np.asarray(state[name]).tobytes() for name in sorted(state))).hexdigest()


def _loss_and_backward(model: Any, x: Tensor, y: Tensor) -> None:
    CrossEntropyLoss()(model(x), y).backward()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("more", "given"), [(0, {}), (3, {"replays": True}), (1, {"micro_batches": 2})])
def test_statistics_over_all_shards_have_the_bits_of_one_rank(several, device, more, given):
    """A rank's shards take turns within forward and backward; with a shard each the ranks exchange as without them."""
    shards = several.size + more
    expected = normalised(Communicator(transport="solo"), device, shards, **given)
    assert normalised(several, device, shards, **given) == expected


def test_statistics_are_those_of_all_shards_and_running_ones_move_once(device):
    comm = Communicator(transport="solo")
    model = SyncBatchNorm.convert_sync_batchnorm(Sequential(BatchNorm1d(3, device=device)), comm)
    sync = Synchronizer(comm, shards=3)
    sync.broadcast_parameters(model)
    x = np.random.default_rng(1).standard_normal((3, 4, 3)).astype(np.float32)
    found: dict[int, np.ndarray] = {}

    def compute(shard: int) -> None:
        y = model(Tensor(x[shard], device))
        y.sum().backward()
        found[shard] = y.numpy()

    sync.run_shards(model, compute)
    whole = x.reshape(-1, 3).astype(np.float64)
    expected = (x - whole.mean(0)) / np.sqrt(whole.var(0) + 1e-5)
    np.testing.assert_allclose(np.stack([found[shard] for shard in range(3)]), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model[0].running_mean.numpy(), 0.1 * whole.mean(0), rtol=1e-4, atol=1e-6)
    assert model[0].num_batches_tracked.numpy() == 1


@pytest.mark.mpi(min_size=2)
def test_shards_with_statistics_over_all_are_refused_one_by_one_and_with_other_layers(auto, device):
    model = SyncBatchNorm.convert_sync_batchnorm(
        Sequential(Linear(3, 4, device=device), BatchNorm1d(4, device=device)), auto
    )
    sync = Synchronizer(auto, shards=2 * auto.size)
    sync.broadcast_parameters(model)
    x = Tensor(np.ones((2, 3), np.float32), device)
    with pytest.raises(ArgumentError, match=r"shard: expected sync\.run_shards") as caught, sync.shard(model, 0):
        pass
    one_line(caught)
    with pytest.raises(ArgumentError, match=r"SyncBatchNorm: expected a forward of logical shards within sync.run_sh"):
        model(x)

    def compute(shard: int) -> None:
        if shard != 2:
            model(x).sum().backward()

    with pytest.raises(ArgumentError, match="run_shards: expected the same layers in each shard's forward") as caught:
        sync.run_shards(model, compute)
    one_line(caught)


def test_a_shards_error_ends_the_others_of_its_rank(device):
    comm = Communicator(transport="solo")
    model = SyncBatchNorm.convert_sync_batchnorm(
        Sequential(Linear(3, 4, device=device), BatchNorm1d(4, device=device)), comm
    )
    sync, threads = Synchronizer(comm, shards=3), threading.active_count()
    sync.broadcast_parameters(model)

    def compute(shard: int) -> None:
        model(Tensor(np.ones((2, 3), np.float32), device))
        assert shard != 1, "the second shard's"

    with pytest.raises(AssertionError, match="the second shard's"):
        sync.run_shards(model, compute)
    assert threading.active_count() == threads
