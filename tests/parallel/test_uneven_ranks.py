"""DistributedDataParallel on ranks that differ: buffers that each forward changes, and numbers of batches."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import DistributedDataParallel
from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from tests.helpers import cpu_device
from tests.parallel.small_networks import Counting, network

pytestmark = pytest.mark.mpi(min_size=1)


# --- buffers ---


@pytest.mark.parametrize("broadcasts", [True, False])
def test_each_training_forward_begins_with_the_buffers_of_rank_0(auto, broadcasts):
    model = Counting(auto.rank)
    ddp = DistributedDataParallel(model, auto, broadcast_buffers=broadcasts)
    x = Tensor(np.full((1, 3), 1.0 + auto.rank, np.float32), cpu_device("cpu"))
    if auto.size > 1 and broadcasts:
        model.mean.copy_from(np.full(2, 100.0 * auto.rank, np.float32))
        model.count.copy_from(np.array(0))
    start, whose = model.mean.numpy()[0], 0 if broadcasts else auto.rank
    first = auto.bcast(start) if broadcasts else start
    for step in range(3):
        ddp(x).sum().backward()
        assert model.seen[0].tolist() == [first + step * (1.0 + whose)] * 2
        ddp.finish_grad_sync()
    before = model.mean.numpy()
    with ddp.no_sync():
        ddp(x)
    ddp.eval()
    ddp(x)  # neither of them communicates
    assert model.mean.numpy().tolist() == (before + 2 * (1.0 + auto.rank)).tolist()
    sent = auto.stats.total("broadcast", "buffers")["calls"]
    assert sent == (3 if broadcasts and auto.size > 1 else 0)


# --- uneven inputs ---


def test_ranks_that_ran_out_get_the_buffers_of_one_that_did_not(auto):
    model = Counting(auto.rank)
    ddp = DistributedDataParallel(model, auto)
    with ddp.join():
        for _ in range(1 + auto.rank):
            x = Tensor(np.full((1, 3), 1.0 + auto.rank, np.float32), cpu_device("cpu"))
            ddp(x).sum().backward()
            ddp.finish_grad_sync()
            ddp.zero_grad()
    # Of the ranks that took a step the lowest one's mean went on: rank 0's in the first, rank 1's in the second, ...
    assert model.mean.numpy().tolist() == [sum(1.0 + rank for rank in range(auto.size))] * 2
    assert int(model.count.numpy()) == auto.size


def test_join_is_refused_with_overlap_and_within_another(auto):
    with (
        pytest.raises(ArgumentError, match=r"^join: expected overlap_grad_reduce=False"),
        DistributedDataParallel(network(), auto, overlap_grad_reduce=True).join(),
    ):
        pass
    ddp = DistributedDataParallel(network(), auto)
    with pytest.raises(ArgumentError, match=r"^join: expected to be entered once"), ddp.join(), ddp.join():
        pass
