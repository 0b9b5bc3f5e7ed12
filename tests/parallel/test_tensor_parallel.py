"""Models divided by a plan: they train as on one rank, alone, beside data parallel, and with the sequence divided."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from clcomm import Communicator, DistributedDataParallel, Mesh
from clcomm.distributed_optimizer import DistributedOptimizer
from clcomm.engine import (
    CrossEntropyLoss,
    Dropout,
    LayerNorm,
    Linear,
    MultiheadAttention,
    ReLU,
    Replay,
    Sequential,
    Tensor,
)
from clcomm.engine import functional as F
from clcomm.engine.nn import GELU, Module, manual_seed
from clcomm.errors import ArgumentError, MismatchError
from clcomm.optim import SGD, AdamW
from clcomm.parallel.tensor_parallel import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    SequenceParallel,
    VocabularyParallel,
    VocabularyParallelCrossEntropyLoss,
    parallelize_module,
)
from models.gpt import GPT, next_token_loss
from tests.helpers import cpu_device, one_line

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.long]
#: The bar: relative to the parameters of one rank.
STEPS, CLOSE = 50, 1e-4
#: All but the number of features are multiples of 1 to 4 ranks, and of 8.
VOCABULARY, TOKENS, WIDTH, HEADS, HIDDEN, CLASSES = 48, 24, 48, 24, 48, 24
FEATURES, BATCH = 6, 3


def device():
    return cpu_device("cpu")


def drawn(*seed: int):
    return np.random.default_rng(seed)


def close(state, expected) -> None:
    assert state.keys() == expected.keys()
    for name, values in state.items():
        assert values.shape == expected[name].shape
        norm = np.linalg.norm(expected[name].astype(np.float64))
        assert np.linalg.norm(values.astype(np.float64) - expected[name]) <= CLOSE * norm, name


def tensor_parallel(comm) -> int:
    """Return how many ranks divide a model: with 4, and with 8, there are two groups of them."""
    return max(2, comm.size // 2) if comm.size % 2 == 0 else comm.size


def alike(comm, arrays) -> bool:
    return len(set(comm.all_gather_object([each.tobytes() for each in arrays].__repr__()))) == 1


# --- what is trained ---


class MLPTask:
    """A multilayer perceptron, divided in two ways beside each other."""

    plans = {  # noqa: RUF012
        "whole": {"0": ColumnParallel(), "2": RowParallel(), "4": ColumnParallel(gather_output=True)},
        "part": {"2": RowParallel(split_input=True), "4": ColumnParallel(gather_output=True)},
    }

    @staticmethod
    def model(seed: int = 0) -> Module:
        rng = drawn(seed)
        model = Sequential(
            Linear(FEATURES, HIDDEN, device=device()), ReLU(), Linear(HIDDEN, 24, device=device()), ReLU(),
            Linear(24, CLASSES, device=device()),
        )  # fmt: skip
        for parameter in model.parameters():
            parameter.copy_from(rng.standard_normal(parameter.shape).astype(np.float32) * 0.3)
        return model

    @staticmethod
    def batch(rank: int, step: int):
        rng = drawn(rank, step)
        return rng.standard_normal((BATCH, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, BATCH).astype(
            np.int32
        )

    @staticmethod
    def loss(comm):
        return CrossEntropyLoss()


class GPTTask:
    """A GPT with the sequence divided or not, the head tied to the embedding or not."""

    plans = {"whole": {}, "part": {}}  # noqa: RUF012

    @staticmethod
    def plan(sequence: bool) -> dict:
        axis = -2 if sequence else None
        plan = {
            "transformer.wte": VocabularyParallel(),
            "transformer.h.*.attn": HeadsParallel("heads"),
            "transformer.h.*.attn.c_attn": ColumnParallel(sections=3, sequence_axis=axis),
            "transformer.h.*.mlp.c_fc": ColumnParallel(sequence_axis=axis),
            "transformer.h.*.*.c_proj": RowParallel(sequence_axis=axis),
            "lm_head": ColumnParallel(sequence_axis=axis),
        }
        if sequence:
            plan |= {"transformer.h": SequenceParallel(split_input=True), "transformer.ln_f": SequenceParallel()}
        return plan

    @staticmethod
    def model(seed: int = 0, tied: bool = True) -> Module:
        return GPT(VOCABULARY, TOKENS, 2, WIDTH, HEADS, tied=tied, device=device(), seed=seed)

    @staticmethod
    def batch(rank: int, step: int):
        tokens = drawn(rank, step).integers(0, VOCABULARY, (BATCH, TOKENS + 1)).astype(np.int32)
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()

    @staticmethod
    def loss(comm):
        return VocabularyParallelCrossEntropyLoss(comm)


GPTTask.plans = {"whole": GPTTask.plan(False), "part": GPTTask.plan(True)}


def joined(task, ranks: int, step: int):
    return [np.concatenate(each) for each in zip(*(task.batch(rank, step) for rank in range(ranks)), strict=True)]


def trained(task, model, ranks: int, loss_fn, make=SGD, steps: int = STEPS) -> Module:
    """Train on the samples of some data-parallel ranks together."""
    optimizer = optimizer_of(make, model)
    for step in range(steps):
        x, targets = (Tensor(each, device()) for each in joined(task, ranks, step))
        loss_fn(model(x), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def optimizer_of(make, parameters):
    if make is SGD:
        return SGD(parameters, 0.1, momentum=0.9)
    # The keys' biases have gradients of 0 but for rounding, which a smaller eps would scale up to the learning rate.
    return make(parameters, 1e-3, eps=1e-5)


def loss_of(task):
    return next_token_loss if task is GPTTask else CrossEntropyLoss()


# --- the bars ---


@pytest.mark.parametrize("kind", ["whole", "part"])
@pytest.mark.parametrize("task", [MLPTask, GPTTask])
@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_tensor_parallel_ranks_train_as_one(transport, make, task, kind):
    comm = Communicator(transport=transport)
    model = parallelize_module(task.model(seed=comm.rank), comm, task.plans[kind])
    trained(task, model, 1, task.loss(comm), make)
    close(model.state_dict(), trained(task, task.model(), 1, loss_of(task), make).state_dict())
    whole = [parameter.numpy() for parameter in model.parameters() if parameter.part is None]
    assert alike(comm, whole)


@pytest.mark.parametrize("kind", ["whole", "part"])
@pytest.mark.parametrize("task", [MLPTask, GPTTask])
@pytest.mark.parametrize(("overlap", "sharded"), [(False, False), (True, False), ("auto", False), (False, True)])
def test_data_parallel_ranks_beside_them_train_as_one(auto, overlap, sharded, task, kind):
    mesh = Mesh(auto, tp=tensor_parallel(auto), dp=-1)
    model = parallelize_module(task.model(seed=auto.rank), mesh["tp"], task.plans[kind])
    ddp = DistributedDataParallel(
        model, mesh["dp"], bucket_size="4KiB", overlap_grad_reduce=overlap, use_distributed_optimizer=sharded
    )
    loss_fn, optimizer = task.loss(mesh["tp"]), SGD(ddp.parameters(), 0.1, momentum=0.9)
    if sharded:
        optimizer = DistributedOptimizer(optimizer, ddp.synchronizer)
    for step in range(STEPS):
        x, targets = (Tensor(each, device()) for each in task.batch(mesh["dp"].rank, step))
        loss_fn(ddp(x), targets).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
    alone = trained(task, task.model(), mesh["dp"].size, loss_of(task))
    close(ddp.state_dict(), alone.state_dict())
    mesh.close()


@pytest.mark.parametrize("kind", ["whole", "part"])
@pytest.mark.parametrize("task", [MLPTask, GPTTask])
def test_replayed_steps_have_the_bits_of_others(auto, task, kind):
    states = []
    for replays in (False, True):
        model = parallelize_module(task.model(), auto, task.plans[kind])
        loss_fn, optimizer = task.loss(auto), SGD(model, 0.1, momentum=0.9)

        def step(x, targets, model=model, loss_fn=loss_fn, optimizer=optimizer):
            loss = loss_fn(model(x), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = Replay(step) if replays else step
        losses = [run(*(Tensor(each, device()) for each in task.batch(0, number))).item() for number in range(16)]
        states.append((losses, {name: each.tobytes() for name, each in model.state_dict().items()}))
        if replays:
            assert run.refusal is None
            assert run.replayed >= 12
    assert states[0] == states[1]


@pytest.mark.parametrize("kind", ["whole", "part"])
def test_accumulated_gradients_are_those_of_one_batch(auto, kind):
    """The sums of replicated parameters' gradients are of each backward, so that nothing counts twice."""
    one, many = (parallelize_module(GPTTask.model(), auto, GPTTask.plans[kind]) for _ in range(2))
    loss_fn = GPTTask.loss(auto)
    x, targets = (Tensor(each, device()) for each in joined(GPTTask, 3, 0))
    loss_fn(one(x), targets).backward()
    for part in range(3):
        x, targets = (Tensor(each, device()) for each in GPTTask.batch(part, 0))
        (loss_fn(many(x), targets) * (1 / 3)).backward()
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        assert np.allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-3, atol=1e-6)


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
        self.norm, self.attention = LayerNorm(WIDTH, device=device()), MultiheadAttention(WIDTH, HEADS, device=device())
        self.mlp = Sequential(
            LayerNorm(WIDTH, device=device()), Linear(WIDTH, HIDDEN, device=device()), GELU(),
            Linear(HIDDEN, WIDTH, device=device()), Dropout(0.0),
        )  # fmt: skip

    def forward(self, x):
        x = x + self.attention(self.norm(x), is_causal=True)
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


# --- state ---


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


# --- clipping, dropout, names ---


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["whole", "part"])
def test_the_norm_of_all_gradients_is_that_of_one_rank(auto, kind, sharded):
    mesh = Mesh(auto, tp=tensor_parallel(auto), dp=-1)
    model = parallelize_module(GPTTask.model(), mesh["tp"], GPTTask.plans[kind])
    ddp = DistributedDataParallel(model, mesh["dp"], use_distributed_optimizer=sharded)
    optimizer = SGD(ddp.parameters(), 0.1)
    if sharded:
        optimizer = DistributedOptimizer(optimizer, ddp.synchronizer)
    x, targets = (Tensor(each, device()) for each in GPTTask.batch(mesh["dp"].rank, 0))
    GPTTask.loss(mesh["tp"])(ddp(x), targets).backward()
    ddp.finish_grad_sync()
    norm = ddp.clip_grad_norm(0.05)
    optimizer.step()
    alone = GPTTask.model()
    x, targets = (Tensor(each, device()) for each in joined(GPTTask, mesh["dp"].size, 0))
    next_token_loss(alone(x), targets).backward()
    squares = sum((parameter.grad.numpy().astype(np.float64) ** 2).sum() for parameter in alone.parameters())
    assert norm == pytest.approx(np.sqrt(squares), rel=1e-4)
    assert len(set(auto.all_gather_object(norm))) == 1
    before = GPTTask.model().state_dict()
    moved = sum(((each - before[name]).astype(np.float64) ** 2).sum() for name, each in ddp.state_dict().items())
    assert np.sqrt(moved) == pytest.approx(0.1 * 0.05, rel=1e-2)
    mesh.close()


def test_dropout_is_alike_on_tensor_parallel_ranks_and_differs_on_others(auto):
    size = tensor_parallel(auto)
    mesh = Mesh(auto, tp=size, dp=-1)
    model = Sequential(Dropout(0.5), Linear(8, 8 * size, device=device()), Dropout(0.5))
    parallelize_module(model, mesh["tp"], {"1": ColumnParallel(), "2": SequenceParallel()})
    for _ in range(2):
        manual_seed(5)
        ones = Tensor(np.ones((16, 64), np.float32), device())
        common, again, own = (model[n](ones).numpy() for n in (0, 0, 2))
        places = auto.all_gather_object((mesh.coordinates["dp"], common.tobytes(), own.tobytes()))
        groups = {dp: {masks for other, masks, _ in places if other == dp} for dp, *_ in places}
        assert all(len(masks) == 1 for masks in groups.values())  # alike within a group, another in each
        assert len(set.union(*groups.values())) == mesh.shape["dp"]
        assert len({mine for *_, mine in places}) == auto.size
        assert common.tobytes() != again.tobytes()
        assert common.tobytes() != own.tobytes() or size == 1
    mesh.close()


def test_stats_name_the_axis_and_what_moved(several):
    mesh = Mesh(several, tp=several.size)
    model = parallelize_module(GPTTask.model(), mesh["tp"], GPTTask.plans["part"])
    trained(GPTTask, model, 1, GPTTask.loss(mesh["tp"]), steps=2)
    table = str(several.stats.table())
    for line in ("reduce_scatter activations", "all_gather activations", "reduce_scatter input gradients",
                 "all_reduce parameter gradients"):  # fmt: skip
        assert f"{line} on tp" in table, table
    mesh.close()


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


# --- plans that do not fit ---


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
    attention = MultiheadAttention(6 * (n + 1), n + 1, device=dev)
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
    refused(several, model, {"1" if odd else "0": ColumnParallel()}, "parallelize_module: expected the same",
            MismatchError)  # fmt: skip
    other = Sequential(Linear(5 if odd else 4, 12 * several.size, device=dev))
    refused(several, other, {"0": ColumnParallel()}, "parallelize_module: expected the same", MismatchError)


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
