"""The state of a divided model is whole, under the names of before."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from clcomm.engine import Tensor
from clcomm.errors import ArgumentError
from clcomm.parallel.tensor_parallel import parallelize_module
from tests.parallel.tensor_parallel.tasks import VOCABULARY, WIDTH, GPTTask, device

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
