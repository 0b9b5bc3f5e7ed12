"""Parameters that are not those of before: an error on every rank, for every way to swap them and every library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clcomm import Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Module, Parameter, Replay, Sequential, Tanh, Tensor
from clcomm.optim import SGD, Adam
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from tests.helpers import one_line
from tests.numpy_models import Model, set_gradients
from tests.numpy_models import Parameter as ArrayParameter

SPARE = "spare"  # a layer or parameter that was made before the first step


class Block(Module):
    """Two layers of one shape, which may be swapped or tied."""

    def __init__(self):
        self.first, self.second = Linear(4, 4), Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x))


def engine_model() -> tuple[Any, dict[str, Any]]:
    model = Module()
    model.body, model.head = Block(), Sequential(Linear(4, 4), Tanh())
    object.__setattr__(model, "forward", lambda x: model.head(model.body(x)))
    return model, {SPARE: Linear(4, 4), "weight": Parameter(np.ones((4, 4), np.float32)), "batch": Tensor}


def torch_model() -> tuple[Any, dict[str, Any]]:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install -e '.[torch]'")
    nn = torch.nn
    model, body = nn.Module(), nn.Module()
    body.first, body.second = nn.Linear(4, 4), nn.Linear(4, 4)
    model.body, model.head = body, nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.forward = lambda x: model.head(body.second(body.first(x)))
    spare = {SPARE: nn.Linear(4, 4), "weight": nn.Parameter(torch.ones(4, 4))}
    return model, {**spare, "linear": nn.Linear, "batch": torch.from_numpy}


def _swap(a: Any, b: Any, name: str) -> None:
    one, two = getattr(a, name), getattr(b, name)
    setattr(a, name, two), setattr(b, name, one)


#: Ways to change a module's parameters, and the parameter that the error names.
MODULE_WAYS: dict[str, tuple[Callable[[Any, dict[str, Any]], Any], str]] = {
    "an attribute": (lambda m, s: setattr(m.body, "first", s[SPARE]), "body.first.weight"),
    "a Sequential's item": (lambda m, s: setattr(m.head, "0", s.get("linear", Linear)(4, 4)), "head.0.weight"),
    "a layer of the model itself": (lambda m, s: setattr(m, "head", s[SPARE]), "head.0.weight"),
    "a nested module": (lambda m, s: setattr(m.body.first, "inner", s[SPARE]), "body.first.inner.weight"),
    "a parameter": (lambda m, s: setattr(m.body.second, "weight", s["weight"]), "body.second.weight"),
    "a tied parameter": (lambda m, s: setattr(m.body.second, "weight", m.body.first.weight), "body.second.weight"),
    "a tied layer": (lambda m, s: setattr(m.body, "second", m.body.first), "body.second.weight"),
    "swapped parameters": (lambda m, s: _swap(m.body.first, m.body.second, "bias"), "body.first.bias"),
    "swapped layers": (lambda m, s: _swap_layers(m.body), "body.first.weight"),
    "a removed parameter": (lambda m, s: setattr(m.body.first, "bias", None), "body.first.bias"),
    "a removed layer": (lambda m, s: delattr(m.body, "second"), "body.second.weight"),
    "an added parameter": (lambda m, s: setattr(m.body, "extra", s["weight"]), "body.extra"),
    "an added layer": (lambda m, s: setattr(m.head, "2", s[SPARE]), "head.2.weight"),
}


def _swap_layers(body: Any) -> None:
    body.first, body.second = body.second, body.first


def same_error(comm, call: Callable[[], Any]) -> str:
    with pytest.raises(ArgumentError) as caught:
        call()
    texts = comm.all_gather_object(one_line(caught))
    assert len(set(texts)) == 1, texts
    return texts[0]


def expected_start(name: str) -> str:
    return f"parameter {name!r}: expected "


RANKS = {"every rank": lambda comm: True, "the last rank": lambda comm: comm.rank == comm.size - 1}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("way", list(MODULE_WAYS))
@pytest.mark.parametrize("make", [engine_model, torch_model])
@pytest.mark.parametrize("ranks", list(RANKS))
def test_modules(comm, make, way, ranks):
    model, spare = make()
    sync = Synchronizer(comm)
    sync.broadcast_parameters(model)
    x = np.ones((2, 4), np.float32)

    def backward() -> None:
        model.forward(spare["batch"](x)).sum().backward()

    for _ in range(2):
        backward()
        sync.sync_gradients(model)
    change, name = MODULE_WAYS[way]
    if RANKS[ranks](comm):
        change(model, spare)
    if way != "a removed layer":
        backward()
    for call in (sync.sync_gradients, sync.sync_gradients, sync.broadcast_parameters):
        text = same_error(comm, lambda call=call: call(model))
        assert text.startswith(expected_start(name)) and "make a new Synchronizer" in text
        assert ("(on rank" in text) == (ranks == "the last rank" and comm.size > 1)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("way", list(MODULE_WAYS))
@pytest.mark.parametrize("ranks", list(RANKS))
def test_a_sharded_update(comm, way, ranks):
    model, spare = engine_model()
    sync = Synchronizer(comm)
    optimizer = DistributedOptimizer(SGD(model, 0.1, momentum=0.9), sync)
    sync.broadcast_parameters(model)

    def step() -> None:
        if way != "a removed layer" or hasattr(model.body, "second"):
            model.forward(Tensor(np.ones((2, 4)))).sum().backward()
        sync.sync_gradients(model)
        optimizer.step(), optimizer.zero_grad()

    step()
    change, name = MODULE_WAYS[way]
    if RANKS[ranks](comm):
        change(model, spare)
    assert same_error(comm, step).startswith(expected_start(name))


@pytest.mark.parametrize("way", list(MODULE_WAYS))
@pytest.mark.parametrize("replayed", [False, True])
def test_an_optimizer_alone(device, way, replayed):
    model, spare = engine_model()
    optimizer = SGD(model, 0.01, momentum=0.9)  # small steps: tanh of large sums has no gradient

    def forward_backward(x: Tensor) -> None:
        model.forward(x).sum().backward()

    run = Replay(forward_backward) if replayed else forward_backward
    x = Tensor(np.ones((2, 4)), model.body.first.weight.device)
    for _ in range(4):
        run(x)
        optimizer.step(), optimizer.zero_grad()
    change, name = MODULE_WAYS[way]
    change(model, spare)
    if way == "a removed layer":
        model.body.second = Linear(4, 4)
    run(x)
    with pytest.raises(ArgumentError, match=r"expected .* make a new one after replacing a layer") as caught:
        optimizer.step()
    assert one_line(caught).startswith(expected_start(name))
    renewed = SGD(model, 0.1)
    before = model.state_dict()
    renewed.zero_grad()
    run(x)
    renewed.step()
    assert any(p.grad is not None and p.grad.numpy().any() for p in model.parameters())
    for name, parameter in model.named_parameters():
        step = 0 if parameter.grad is None else 0.1 * parameter.grad.numpy()
        np.testing.assert_allclose(parameter.numpy(), before[name] - step, rtol=1e-5, atol=1e-7)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_new_synchronizer_and_optimizer_train_replaced_layers_as_one_rank(comm, is_sharded, overlap):
    """The layers are a Sequential's item and one of the model itself; the optimizers before are still there."""
    if is_sharded and overlap:
        pytest.skip("a sharded update is refused with overlap")
    (model, _), (alone, _), kept = engine_model(), engine_model(), []
    for change in (None, lambda m: setattr(m.head, "0", Linear(4, 4)), lambda m: setattr(m, "head", Linear(4, 4))):
        if change is not None:
            change(model), change(alone)
        sync = Synchronizer(comm, overlap=overlap)
        sync.broadcast_parameters(model)
        alone.load_state_dict(model.state_dict())
        optimizer, expected = Adam(model, 0.01, eps=1e-2), Adam(alone, 0.01, eps=1e-2)
        if is_sharded:
            optimizer = DistributedOptimizer(optimizer, sync)
        kept.append((sync, optimizer))
        for step in range(3):
            x = np.random.default_rng(step).standard_normal((comm.size, 4, 4)).astype(np.float32)
            model.forward(Tensor(x[comm.rank])).sum().backward()
            sync.sync_gradients(model)
            optimizer.step(), optimizer.zero_grad()
            (alone.forward(Tensor(x.reshape(-1, 4))).sum() * (1 / comm.size)).backward()
            expected.step(), expected.zero_grad()
        for name, values in alone.state_dict().items():
            np.testing.assert_allclose(model.state_dict()[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


ARRAY_WAYS: dict[str, tuple[Callable[[Model], Any], str]] = {
    "a parameter": (lambda m: m.parameters.update(w=ArrayParameter(np.ones((2, 3)))), "w"),
    "a tied parameter": (lambda m: m.parameters.update(v=m.parameters["w"]), "v"),
    "swapped": (lambda m: m.parameters.update(v=m["w"], w=m["v"]), "w"),
    "removed": (lambda m: m.parameters.pop("v"), "v"),
    "added": (lambda m: m.parameters.update(u=ArrayParameter(np.ones(2))), "u"),
    "another shape": (lambda m: setattr(m["v"], "data", np.ones(3)), "v"),
}


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("way", list(ARRAY_WAYS))
@pytest.mark.parametrize("ranks", list(RANKS))
def test_models_of_arrays(comm, way, ranks):
    model, sync = Model([("w", np.zeros((2, 3))), ("v", np.zeros((2, 3)))]), Synchronizer(comm)
    for parameter in model.parameters.values():
        parameter.data = parameter.data - 0.1  # another array is not another parameter
        set_gradients(model, comm.rank)
        sync.sync_gradients(model)
    change, name = ARRAY_WAYS[way]
    if RANKS[ranks](comm):
        change(model)
    assert same_error(comm, lambda: sync.sync_gradients(model)).startswith(expected_start(name))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("ranks", list(RANKS))
@pytest.mark.parametrize("way", ["a layer", "a parameter", "removed", "added"])
def test_netcl_models(comm, way, ranks):
    pytest.importorskip("netcl", reason="netcl is not installed")
    from clcomm.sync.adapters.netcl import NetclModel, cross_entropy, prepare
    from clcomm.sync.adapters.netcl_optim import NetclOptimizer

    queue = prepare().queue
    from netcl import nn

    def linear():
        return nn.Linear(queue, 4, 4)

    module = nn.Sequential(linear(), nn.Tanh())
    module.extra = linear()
    model, sync = NetclModel(module), Synchronizer(comm)
    optimizer = NetclOptimizer(model, "sgd", 0.1, momentum=0.9)
    sync.broadcast_parameters(model)
    for _ in range(2):
        cross_entropy(model(np.ones((2, 4))), np.array([0, 1])).backward()
        sync.sync_gradients(model)
        optimizer.step(), optimizer.zero_grad()
    changes: dict[str, Callable[[], Any]] = {
        "a layer": lambda: setattr(module, "extra", linear()),
        "a parameter": lambda: setattr(module.extra, "weight", linear().weight),
        "removed": lambda: delattr(module, "extra"),
        "added": lambda: setattr(module, "more", linear()),
    }
    if RANKS[ranks](comm):
        changes[way]()
    text = same_error(comm, lambda: sync.sync_gradients(model))
    assert text.startswith("parameter '" + ("more." if way == "added" else "extra."))
    if RANKS[ranks](comm):
        with pytest.raises(ArgumentError, match="make a new NetclModel"):
            optimizer.step()
