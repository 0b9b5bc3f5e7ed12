"""Plans that do not fit are refused on all ranks, with the numbers."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Mesh, Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.engine import LayerNorm, Linear, MultiheadAttention, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.engine.nn import Module
from clcomm.parallel.tensor_parallel import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    SequenceParallel,
    VocabularyParallel,
    parallelize_module,
)
from tests.helpers import cpu_device, one_line
from tests.parallel.tensor_parallel.tasks import TOKENS, GPTTask, MLPTask, device

pytestmark = pytest.mark.mpi(min_size=1)


def refused(comm, model, plan, message, kind=ArgumentError) -> None:
    before = model.state_dict()
    with pytest.raises(kind, match=message) as caught:
        parallelize_module(model, comm, plan)
    assert len(set(comm.all_gather_object(one_line(caught)))) == 1
    assert all(np.array_equal(each, before[name]) for name, each in model.state_dict().items())


def test_plans_that_do_not_fit_are_refused_on_all_ranks_with_the_numbers(several):
    n, dev = several.size, device()

    class Heads(Module):
        def __init__(self):
            self.heads, self.qkv = n + 1, Linear(4, 12 * n, device=dev)

    class Doubled(Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layers = Sequential(Linear(n + 1, 4 * n, device=dev), Linear(2 * n, n + 1, device=dev), LayerNorm(4, device=dev))
    attention = MultiheadAttention(6 * (n + 1), n + 1, batch_first=True, device=dev)
    gpt, column = GPTTask.model(), ColumnParallel()
    for model, plan, message in (
        (layers, {"1": column}, rf"^plan\['1'\]: ColumnParallel: expected outputs that {n} ranks divide, got {n + 1}$"),
        (layers, {"0": RowParallel()}, rf"^plan\['0'\]: RowParallel: expected inputs that {n} ranks .* got {n + 1}$"),
        (layers, {"*": column}, r"^plan\['\*'\]: 1: ColumnParallel: expected outputs"),
        (layers, {"0": ColumnParallel(sections=3)}, f"outputs in 3 sections that {n} ranks divide, got {4 * n}"
            if n != 3 else "outputs in 3 sections"),
        (layers, {"0": ColumnParallel(sections=0)}, "expected sections from 1 up, got 0"),
        (layers, {"0": ColumnParallel(2, gather_output=True)}, "expected gather_output=False"),
        (layers, {"2": column}, r"^plan\['2'\]: ColumnParallel: expected a Linear, got LayerNorm$"),
        (layers, {"0": VocabularyParallel()}, "expected a Embedding, got Linear"),
        (layers, {"0": HeadsParallel("heads")}, "expected 'heads' to be a number of heads in Linear, got None"),
        (layers, {"fc1": column}, r"^plan\['fc1'\]: expected the name of a module, such as .*, got one of none$"),
        (layers, {"*.0": column}, "got one of none"),
        (layers, {0: column}, "expected patterns of names, got 0"),
        (layers, {"0": "column"}, "expected a style such as ColumnParallel.., got 'column'"),
        (layers, {}, "plan: expected a dict of name patterns and styles"),
        (layers, {"0": column, "[0]": RowParallel(split_input=True)}, "expected one style for each module"),
        (Sequential(Doubled(2, 2 * n, device=dev)), {"0": column}, "got Doubled with a forward.. of its own"),
        (attention, HeadsParallel(), rf"expected heads that {n} ranks divide, got {n + 1}"),
        (attention, HeadsParallel("num_heads"), "expected no attributes for a MultiheadAttention"),
        (Heads(), {"": HeadsParallel("heads"), "qkv": column}, rf"expected heads that {n} ranks divide, got {n + 1}"),
        (Heads(), {"qkv": column}, rf"^plan: expected an entry for '' too, whose heads {n + 1} would be"),
        (gpt, {"transformer.wte": VocabularyParallel()}, "expected 'lm_head.weight' divided like 'transformer.wte.w"),
        (gpt, {"transformer.wte": VocabularyParallel(), "lm_head": RowParallel()}, "dimension 1 divided and dimens"),
        (gpt, {"transformer.h": SequenceParallel(), "transformer.h.*.mlp.c_fc": column}, "expected a sequence_axis"),
    ):  # fmt: skip
        refused(several, model, plan, message)


def test_ranks_that_differ_in_plan_or_model_are_refused(several):
    odd, dev = several.rank == several.size - 1, device()
    model = Sequential(Linear(4, 12 * several.size, device=dev))
    refused(several, model, {"0": ColumnParallel(gather_output=odd)}, "parallelize_module: expected the same",
            MismatchError)  # fmt: skip
    message = rf"^plan\['1'\]: expected the name of a module, .* got one of none.*rank {several.size - 1}\)$"
    refused(several, model, {"1" if odd else "0": ColumnParallel()}, message)
    other = Sequential(Linear(5 if odd else 4, 12 * several.size, device=dev))
    refused(several, other, {"0": ColumnParallel()}, "parallelize_module: expected the same", MismatchError)


def test_devices_of_several_kinds_are_refused(several):
    """Their kernels round differently, so that what all ranks compute alike would drift apart."""
    odd = cpu_device("gpu" if several.rank == several.size - 1 else "cpu")
    message = r"parallelize_module: expected the same on every rank, .*'device: cpu, .* and kind of device$"
    refused(several, Sequential(Linear(4, 12 * several.size, device=odd)), {"0": ColumnParallel()}, message,
            MismatchError)  # fmt: skip


def test_a_model_in_use_or_of_another_kind_is_refused(several):
    model = MLPTask.model()
    for wrong, message in ((several.size, "comm: expected a Communicator"), (None, "got NoneType")):
        with pytest.raises(ArgumentError, match=message):
            parallelize_module(model, wrong, MLPTask.plans["whole"])
    with pytest.raises(ArgumentError, match=r"module: expected one of clcomm\.engine, got object"):
        parallelize_module(object(), several, {"0": ColumnParallel()})
    model.flat_space()
    refused(several, model, MLPTask.plans["whole"], "call parallelize_module first")
    model = parallelize_module(MLPTask.model(), several, MLPTask.plans["whole"])
    refused(several, model, {"0": ColumnParallel()}, "call parallelize_module first")


def test_a_sequence_that_the_ranks_do_not_divide_is_refused_with_the_numbers(several):
    model = parallelize_module(GPTTask.model(), several, GPTTask.plan(True))
    length = TOKENS - 1
    if length % several.size:
        with pytest.raises(ArgumentError, match=f"{several.size} ranks divide, got {length} in shape") as caught:
            model(Tensor(np.zeros((2, length), np.int32), device()))
        one_line(caught)


class UsesWeights(Module):
    """Gives the function the weight, as models that join a layer with its activation do."""

    def __init__(self):
        self.fc1 = Linear(4, 12, device=device())

    def forward(self, x):
        return F.linear(x, self.fc1.weight, self.fc1.bias, relu=True)


def test_a_model_that_uses_the_weight_of_a_divided_layer_itself_is_refused(several):
    """Its result would be right, and the gradients of what comes before the layer a part of theirs."""
    model = parallelize_module(UsesWeights(), several, {"fc1": ColumnParallel(gather_output=True)})
    x = Tensor(np.zeros((2, 4), np.float32), device())
    if several.size == 1:
        model(x)
        return
    with pytest.raises(ArgumentError, match=f"linear: expected the layer to be called.*{several.size} ranks") as caught:
        model(x)
    one_line(caught)


@pytest.mark.parametrize("policy", ["diloco:h=2", "sparseloco:h=2"])
def test_a_policy_refuses_a_divided_model_on_all_ranks(several, policy):
    n, dev = several.size, device()
    mesh = Mesh(several, dp=1, tp=n)
    model = Sequential(Linear(4, 4 * n, device=dev), Linear(4 * n, 4, device=dev))
    parallelize_module(model, mesh["tp"], {"0": ColumnParallel(), "1": RowParallel()})
    sync = Synchronizer(mesh["dp"], policy=policy)
    sync.broadcast_parameters(model)
    model(Tensor(np.ones((2, 4), np.float32), dev)).sum().backward()
    with pytest.raises(ArgumentError, match=r"^policy: expected a model that each rank has whole"):
        sync.sync_gradients(model)
