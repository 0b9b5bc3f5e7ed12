"""Models with fused functions: the bits of the functions alone on any number of ranks, with overlap and replayed."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.engine import Linear, Module, MSELoss, Parameter, Replay, Tensor, fused
from clcomm.engine import functional as F
from clcomm.engine.nn import Generator
from clcomm.optim import Adam


def gated(x, bias, scale):
    shifted = x + bias
    return shifted * F.sigmoid(1.702 * shifted) * F.exp(scale) + x


class Net(Module):
    """Two layers with a function between them, whose vectors are trained."""

    def __init__(self, function, device):
        super().__init__()
        rng = Generator(0)
        self.function = function
        self.first = Linear(5, 9, device=device, rng=rng)
        self.bias, self.scale = (Parameter(np.full(9, value, np.float32), device) for value in (0.1, -0.2))
        self.second = Linear(9, 3, device=device, rng=rng)

    def forward(self, x):
        return self.second(self.function(self.first(x), self.bias, self.scale))


def trained(comm, device, function, overlap: bool, replays: bool) -> bytes:
    net, loss_fn = Net(function, device), MSELoss()
    sync = Synchronizer(comm, bucket_size=512, overlap=overlap)
    sync.broadcast_parameters(net)
    optimizer = Adam(net, lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_fn(net(x), y)
        loss.backward()
        return loss

    run = Replay(step) if replays else step
    for number in range(6):
        values = np.random.default_rng([number, comm.rank])
        run(*(Tensor(values.normal(size=(4, n)).astype(np.float32), device) for n in (5, 3)))
        sync.sync_gradients(net)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(run, Replay):
        assert run.replayed >= 2, run.refusal
    return b"".join(parameter.numpy().tobytes() for parameter in net.parameters())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("replays", [False, True])
def test_a_model_with_fused_functions_has_the_bits_of_the_plain_one(comm, device, overlap, replays):
    function = fused(gated)
    found = trained(comm, device, function, overlap, replays)
    assert found == trained(comm, device, gated, False, False)
    assert found == trained(comm, device, function, not overlap, replays)
    assert comm.all_gather_object(found) == [found] * comm.size
