"""Steps that synchronise, within a Replay: the bits of the plain loop, as no replay leaves other ranks waiting."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from clcomm import Synchronizer, clip_grad_norm
from clcomm.engine import Linear, MSELoss, Replay, Sequential, Tanh, Tensor
from clcomm.engine.nn import Generator
from clcomm.optim import Adam
from clcomm.sync.distributed_optimizer import DistributedOptimizer

STEPS = 8
CLIP, SAMPLES, BROADCAST, SHARDED = "clip", "samples", "broadcast", "sharded"
#: What a step does beside its synchronisation.
WAYS = [(), (CLIP,), (SAMPLES,), (BROADCAST,), (SHARDED,), (SHARDED, SAMPLES), (SHARDED, CLIP)]
CASES = [
    (ways, overlap, bucket_size)
    for ways, overlap, bucket_size in product(WAYS, (False, True), (512, 1 << 20))
    if not (overlap and {SAMPLES, SHARDED} & set(ways))
]


def trained(comm, device, ways: tuple[str, ...], overlap: bool, bucket_size: int, replays: bool) -> tuple[bytes, Any]:
    """Train a net whose step synchronises; return its parameters' bits and what ran the step."""
    rng = Generator(0)
    net = Sequential(Linear(5, 9, device=device, rng=rng), Tanh(), Linear(9, 3, device=device, rng=rng))
    sync = Synchronizer(comm, bucket_size=bucket_size, overlap=overlap)
    sync.broadcast_parameters(net)
    optimizer: Any = Adam(net, lr=0.01)
    if SHARDED in ways:
        optimizer = DistributedOptimizer(optimizer, sync)
    loss_fn = MSELoss()

    def step(x: Tensor, y: Tensor, samples: int) -> Tensor:
        loss = loss_fn(net(x), y)
        loss.backward()
        sync.sync_gradients(net, samples=samples if SAMPLES in ways else None)
        if CLIP in ways:
            clip_grad_norm(sync, net, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if BROADCAST in ways:
            sync.broadcast_parameters(net)
        return loss

    function = Replay(step, check_every=2) if replays else step
    for number in range(STEPS):
        values = np.random.default_rng([number, comm.rank])
        x, y = (Tensor(values.normal(size=(4, n)).astype(np.float32), device) for n in (5, 3))
        function(x, y, comm.rank + 1)
    return b"".join(parameter.numpy().tobytes() for parameter in net.parameters()), function


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("ways", "overlap", "bucket_size"), CASES)
def test_a_step_that_synchronises_has_the_bits_of_the_plain_loop(comm, device, ways, overlap, bucket_size):
    expected, _ = trained(comm, device, ways, overlap, bucket_size, replays=False)
    found, replay = trained(comm, device, ways, overlap, bucket_size, replays=True)
    assert found == expected
    assert replay.replayed == 0 and "between ranks" in replay.refusal
