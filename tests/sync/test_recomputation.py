"""Recomputed blocks and gradient hooks with a Synchronizer: the bits of plain steps, on every rank and stage."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.engine import Tensor, nn
from clcomm.engine.recomputation import checkpoint
from clcomm.optim import SGD
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.sharded_jobs import cpu


def trained(comm, stage: int, call, precision: str = "float32", hooked: bool = True) -> list[bytes]:
    device = cpu()
    nn.manual_seed(comm.rank)  # every rank gets rank 0's
    block = nn.Sequential(nn.Linear(6, 9, device=device), nn.ReLU(), nn.Dropout(0.4), nn.Linear(9, 6, device=device))
    model = nn.ModuleList([block, nn.Linear(6, 2, device=device)])
    sync = Synchronizer(comm, zero=stage or 1, bucket_size="4KiB", precision=precision)
    optimizer = SGD(model, 0.05, momentum=0.9, dampening=0.2, maximize=True)
    optimizer = DistributedOptimizer(optimizer, sync) if stage else optimizer
    sync.broadcast_parameters(model)
    if hooked:
        block[0].weight.register_hook(lambda grad: grad * 0.5)
    for number in range(3):
        h = Tensor(np.random.default_rng([comm.rank, number]).standard_normal((4, 6)), device)
        for _ in range(2):  # shares its weights, so that their gradients are complete with the first one's
            h = h + call(block, h)
        model[1](h).square().mean().backward()
        sync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return [values.tobytes() for values in model.state_dict().values()]


@pytest.mark.mpi
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_recomputed_blocks_have_the_bits_of_plain_ones(comm, stage, precision):
    expected = trained(comm, stage, lambda function, *given: function(*given), precision)
    assert trained(comm, stage, checkpoint, precision) == expected
    assert trained(comm, stage, checkpoint, precision, hooked=False) != expected
    assert len(set(comm.all_gather_object(b"".join(expected)))) == 1
