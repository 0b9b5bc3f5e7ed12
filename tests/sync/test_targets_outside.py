"""A target that is no class on one rank, known to its device alone, is an error on every rank before any steps."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Replay, Sequential, Tanh, Tensor
from clcomm.engine import functional as F
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer

SETTINGS = {
    "plain": {}, "per tensor": {"use_bucketing": False}, "overlap": {"overlap": True},
    "finite": {"check_finite": True}, "compressed": {"compression": "fp16"}, "policy": {"policy": "local:h=2"},
    "zero": {}, "zero 2": {"zero": 2}, "shards": {"shards": 4},
}  # fmt: skip


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "replays"), [*((name, False) for name in SETTINGS), ("plain", True), ("overlap", True)]
)
def test_it_is_named_on_every_rank(name, replays):
    with Communicator() as comm:
        sync, model = Synchronizer(comm, **SETTINGS[name]), Sequential(Linear(3, 5), Tanh(), Linear(5, 4))
        sync.broadcast_parameters(model)
        optimizer = SGD(model, 0.1)
        if name.startswith("zero"):
            optimizer = DistributedOptimizer(optimizer, sync)
        x, culprit = Tensor(np.ones((2, 3))), comm.size - 1

        def loss_of(targets):
            F.cross_entropy(model(x), targets).backward()

        step = Replay(loss_of) if replays and name != "shards" else loss_of
        for number in range(6):
            labels = [1, 9 if number == 4 and comm.rank == culprit else number % 4]
            before = [each.numpy() for each in model.parameters()] if name != "zero 2" else []
            try:
                targets = Tensor(np.int32(labels), copy=False)
                if name == "shards":
                    for shard in sync.shards.own:
                        with sync.shard(model, shard):
                            step(targets)
                else:
                    step(targets)
                sync.sync_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
                sync.finish_step(model)
                comm.barrier()
            except ArgumentError as error:
                assert str(error) == f"loss: targets must be 0 to 3, got 9 (on rank {culprit})", str(error)
                assert number == 4
                if name not in ("zero 2", "overlap", "policy"):  # of which the others have stepped, or sharded
                    for each, other in zip(model.parameters(), before, strict=True):
                        np.testing.assert_array_equal(each.numpy(), other)
                break
            assert number < 4, "no error"
