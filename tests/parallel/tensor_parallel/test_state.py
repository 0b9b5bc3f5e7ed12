"""The state of a divided model is whole, under the names of before."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from clcomm import DistributedDataParallel, Mesh
from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.optim import AdamW
from clcomm.parallel.tensor_parallel import divided_state, gathered_state, parallelize_module
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from models.gpt import next_token_loss
from tests.parallel.tensor_parallel.tasks import (
    VOCABULARY,
    WIDTH,
    GPTTask,
    close,
    device,
    joined,
    tensor_parallel,
)

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.parametrize("tied", [True, False])
def test_state_is_whole_under_the_names_of_before(auto, tied):
    whole = GPTTask.model(3, tied)
    state = whole.state_dict()
    model = parallelize_module(GPTTask.model(auto.rank + 3, tied), auto, GPTTask.plan(True))
    own = model.state_dict()
    assert list(own) == list(state)
    assert all(np.array_equal(own[name], state[name]) for name in state)
    assert model.transformer.h[0].attn.c_attn.weight.shape == (3 * WIDTH // auto.size, WIDTH)
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    other = GPTTask.model(9, tied).state_dict()
    model.load_state_dict(other)
    model.flat_space()
    assert all(np.array_equal(each, other[name]) for name, each in model.state_dict().items())
    copied = copy.deepcopy(model)
    assert all(np.array_equal(each, other[name]) for name, each in copied.state_dict().items())
    x, _ = GPTTask.batch(0, 0)
    with_head = GPTTask.model(9, tied)
    expected = with_head(Tensor(x, device())).numpy()
    for each in (model, copied):
        logits = each(Tensor(x, device())).numpy()
        assert np.allclose(auto.all_gather(logits).transpose(1, 2, 0, 3).reshape(expected.shape), expected, atol=1e-5)
    inner = model.transformer.wte.state_dict()["weight"]
    assert np.array_equal(inner, other["transformer.wte.weight"])
    part = {**other, "transformer.wte.weight": other["transformer.wte.weight"][:-1]}
    with pytest.raises(ArgumentError, match=rf"expected \({VOCABULARY}, {WIDTH}\)"):
        model.load_state_dict(part)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_optimizer_s_state_is_gathered_and_divided(auto, sharded):
    """It is the undivided model's: that optimizer continues from it, and this one from that one's."""
    mesh = Mesh(auto, tp=tensor_parallel(auto), dp=-1)
    model = parallelize_module(GPTTask.model(), mesh["tp"], GPTTask.plan(False))
    ddp = DistributedDataParallel(model, mesh["dp"], use_distributed_optimizer=sharded)
    optimizer = AdamW(ddp.parameters(), 1e-3, eps=1e-5)
    if sharded:
        optimizer = DistributedOptimizer(optimizer, ddp.synchronizer)
    alone = GPTTask.model()
    whole = AdamW(alone.parameters(), 1e-3, eps=1e-5)  # without names
    for step in range(4):
        if step == 2:  # each goes on with the other's
            first, second = gathered_state(optimizer), whole.state_dict()
            for name in ("mean", "square"):
                assert np.allclose(first[name], second[name], rtol=1e-3, atol=1e-6)
            whole.load_state_dict(first)
            optimizer.load_state_dict(divided_state(optimizer, second))
            assert all(
                np.array_equal(each, second[name])
                for name, each in gathered_state(optimizer).items()
                if name != "names"
            )
        for each, kind in ((ddp, "own"), (alone, "all")):
            batch = GPTTask.batch(mesh["dp"].rank, step) if kind == "own" else joined(GPTTask, mesh["dp"].size, step)
            loss_fn = GPTTask.loss(mesh["tp"]) if kind == "own" else next_token_loss
            loss_fn(each(Tensor(batch[0], device())), Tensor(batch[1], device())).backward()
        ddp.finish_grad_sync()
        for each in (optimizer, whole):
            each.step()
            each.zero_grad()
    close(ddp.state_dict(), alone.state_dict())
    wrong = dict(second, mean=second["mean"][:-1])
    with pytest.raises(ArgumentError, match=r"state_dict\['mean'\]: expected"):
        optimizer.load_state_dict(divided_state(optimizer, wrong))
    mesh.close()
