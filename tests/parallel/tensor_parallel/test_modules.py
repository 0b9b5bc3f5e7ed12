"""Users' own modules divided by a plan, modules called alone, and veScale's documented example."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from clcomm.engine import Dropout, LayerNorm, Linear, MultiheadAttention, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.engine.nn import GELU, Module, manual_seed
from clcomm.parallel.tensor_parallel import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    SequenceParallel,
    parallelize_module,
)
from tests.parallel.tensor_parallel.tasks import HEADS, HIDDEN, TOKENS, WIDTH, device, drawn

pytestmark = pytest.mark.mpi(min_size=1)


def test_modules_of_a_divided_sequence_may_be_called_alone(auto):
    """A layer norm's gradients are sums over the ranks, whoever calls it, frozen parameters have none."""
    tokens = 2 * auto.size
    model = Sequential(LayerNorm(8, device=device()), GELU(), LayerNorm(8, device=device()))
    whole = copy.deepcopy(model)
    model[2].weight.requires_grad = False
    parallelize_module(model, auto, {"0": SequenceParallel(), "2": SequenceParallel()})
    x = drawn(0).standard_normal((3, tokens, 8)).astype(np.float32)
    g = drawn(1).standard_normal(x.shape).astype(np.float32)
    own = [np.ascontiguousarray(np.split(each, auto.size, 1)[auto.rank]) for each in (x, g)]
    model(Tensor(own[0], device())).backward(Tensor(own[1], device()))
    whole(Tensor(x, device())).backward(Tensor(g, device()))
    for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
        if name == "2.weight":
            assert a.grad is None
        else:
            assert np.allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-3, atol=1e-5), name
    assert model[0].weight.part is None


class OwnBlock(Module):
    """A user's block, with PyTorch's attention and an MLP, and a dropout in each place."""

    def __init__(self):
        self.norm, self.attention = (
            LayerNorm(WIDTH, device=device()),
            MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device()),
        )
        self.mlp = Sequential(
            LayerNorm(WIDTH, device=device()), Linear(WIDTH, HIDDEN, device=device()), GELU(),
            Linear(HIDDEN, WIDTH, device=device()), Dropout(0.0),
        )  # fmt: skip

    def forward(self, x):
        x = x + self.attention(self.norm(x), need_weights=False, is_causal=True)[0]
        return x + self.mlp(x)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_users_own_module_is_divided(auto, sequence):
    axis = 1 if sequence else None
    plan = {
        "*.attention": HeadsParallel(sequence_axis=axis),
        "*.mlp.1": ColumnParallel(sequence_axis=axis),
        "*.mlp.3": RowParallel(sequence_axis=axis),
    }
    if sequence:
        plan |= {"": SequenceParallel(split_input=True, gather_output=True, axis=1)}
    manual_seed(0)
    whole = Sequential(OwnBlock(), OwnBlock())
    model = parallelize_module(copy.deepcopy(whole), auto, plan)
    x, g = (drawn(n).standard_normal((2, TOKENS, WIDTH)).astype(np.float32) for n in (0, 1))
    results = []
    for each in (whole, model):
        given = Tensor(x, device(), requires_grad=True)
        y = each(given)
        y.backward(Tensor(g, device()))
        results.append((y.numpy(), given.grad.numpy()))
    assert np.allclose(*(y for y, _ in results), rtol=1e-3, atol=1e-5)
    assert np.allclose(*(dx for _, dx in results), rtol=1e-3, atol=1e-5)
    for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
        own = a.grad.numpy() if a.part is None else a.part.gather(a.grad.numpy())
        assert np.allclose(own, b.grad.numpy(), rtol=1e-3, atol=1e-5), name


# --- veScale's documented example, with its imports changed and "cuda" left out ---


class MLP(Module):
    def __init__(self):
        self.fc1 = Linear(8, 32, device=device())
        self.fc2 = Linear(32, 8, device=device())

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_the_example_of_vescale(auto, overlap, sharded):
    from clcomm.parallel import DeviceMesh, parallelize_module
    from clcomm.parallel import DistributedDataParallel as DDP

    sharding_plan = {"fc1": ColumnParallel(), "fc2": RowParallel()}
    mlp = MLP()
    ranks = np.arange(auto.size).reshape(-1, 2 if auto.size % 2 == 0 else 1).tolist()
    device_mesh = DeviceMesh(ranks, mesh_dim_names=("DP", "TP"), comm=auto)
    tp_mlp = parallelize_module(mlp, device_mesh["TP"], sharding_plan)
    dp_tp_mlp = DDP(tp_mlp, device_mesh["DP"], overlap_grad_reduce=overlap, use_distributed_optimizer=sharded)
    whole = MLP()
    whole.load_state_dict(dp_tp_mlp.state_dict())
    inputs = [drawn(rank).random((3, 8), np.float32) for rank in range(device_mesh["DP"].size)]
    dp_tp_mlp(Tensor(inputs[device_mesh["DP"].rank], device())).sum().backward()
    dp_tp_mlp.finish_grad_sync()
    (whole(Tensor(np.concatenate(inputs), device())).sum() * (1 / len(inputs))).backward()
    for a, b in zip(dp_tp_mlp.parameters(), whole.parameters(), strict=True):
        if not sharded:  # else the DistributedOptimizer averages
            mean = a.grad.numpy() if a.part is None else a.part.gather(a.grad.numpy())
            assert np.allclose(mean, b.grad.numpy(), rtol=1e-4, atol=1e-5)
    device_mesh.close()
