"""Buffers of modules: names, state, copies, modes, and steps that are replayed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Module, Parameter, Replay, Sequential, Tensor
from clcomm.engine import functional as F
from clcomm.engine.nn.module import evaluating
from clcomm.engine.tensor import copy_into


class Counting(Module):
    """Adds x to a total on the device, and returns x times the last total."""

    def __init__(self, device):
        self.weight = Parameter([2.0], device)
        self.register_buffer("total", Tensor([1.0], device))
        self.register_buffer("steps", Tensor(np.int32(7), device))
        self.register_buffer("scratch", Tensor([5.0], device), persistent=False)
        self.register_buffer("missing", None)

    def forward(self, x):
        assert self.total is not None
        copy_into(self.total, F.add(self.total, x.detach()))
        return x * self.weight * self.total


class Both(Module):
    def __init__(self, device):
        self.first = Counting(device)
        self.layer = Linear(1, 1, device=device)
        self.twin = self.first

    def forward(self, x):
        return self.first(x)


def test_names_and_order_are_pytorchs(device):
    torch = pytest.importorskip("torch")

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([2.0]))
            self.register_buffer("total", torch.tensor([1.0]))
            self.register_buffer("steps", torch.tensor(7))
            self.register_buffer("scratch", torch.tensor([5.0]), persistent=False)
            self.register_buffer("missing", None)

    ours, theirs = (
        kind(first, layer)
        for kind, first, layer in (
            (Sequential, Counting(device), Linear(1, 1, device=device)),
            (torch.nn.Sequential, Theirs(), torch.nn.Linear(1, 1)),
        )
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_buffers()] == [name for name, _ in theirs.named_buffers()]
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    state["0.steps"] = np.array(123)
    assert state["0.steps"].dtype == np.int64
    ours.load_state_dict(state)
    loaded = ours.state_dict()
    assert loaded["0.steps"] == 123 and loaded["0.steps"].dtype == np.int32
    theirs.load_state_dict({name: torch.tensor(value) for name, value in loaded.items()})
    assert theirs[0].steps.item() == 123


def test_a_shared_module_counts_once_and_its_state_has_all_names_as_in_pytorch(device):
    model = Both(device)
    assert [name for name, _ in model.named_buffers()] == ["first.total", "first.steps", "first.scratch"]
    names = ["first.weight", "first.total", "first.steps", "layer.weight", "layer.bias"]
    state = model.state_dict()
    assert list(state) == [*names, "twin.weight", "twin.total", "twin.steps"]
    model.load_state_dict({name: state[name] + 1 for name in names})  # one of its names is enough
    assert model.state_dict()["twin.total"] == state["first.total"] + 1 == 2
    assert [name for name, _ in model.named_parameters()] == [names[0], *names[3:]]
    assert model.parameter_count() == 3


def test_assignment_replaces_and_deletion_removes(device):
    module = Counting(device)
    module.total = Tensor([4.0], device)
    module.scratch = None
    assert dict(module.named_buffers()).keys() == {"total", "steps"} and module.state_dict()["total"] == 4
    module.register_buffer("total", Tensor([3.0], device), persistent=False)
    assert list(module.state_dict()) == ["weight", "steps"]
    del module.steps
    assert [name for name, _ in module.named_buffers()] == ["total"]
    module.flat_space()
    module.register_buffer("late", Tensor([1.0], device))
    assert list(module.state_dict()) == ["weight", "late"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_buffers_of_their_own(device, duplicate, monkeypatch):
    monkeypatch.setattr("clcomm.engine.tensor.default_device", lambda: device)
    model = Both(device)
    copied = duplicate(model)
    assert copied.first.total is dict(copied.named_buffers())["first.total"] and copied.twin is copied.first
    copied(Tensor([3.0], device))
    assert copied.state_dict()["first.total"] == 4 and model.state_dict()["first.total"] == 1
    shallow = copy.copy(model.first)
    shallow.register_buffer("other", Tensor([1.0], device))
    assert shallow.total is model.first.total and "other" not in model.first.state_dict()


def test_a_replayed_step_changes_buffers_as_a_plain_one(device):
    plain, replayed = Counting(device), Counting(device)
    for module in (plain, replayed):
        module.flat_space()

    def step_of(module):
        def step(x):
            module.zero_grad()
            y = F.sum(module(x))
            y.backward()
            return y

        return step

    replay = Replay(step_of(replayed))
    for number in range(15):  # checks included
        x = Tensor([0.5 * number], device)
        assert step_of(plain)(x).item() == replay(x).item()
        assert plain.state_dict()["total"] == replayed.state_dict()["total"]
    assert replay.replayed > 5 and replay.refusal is None
    replayed.total = Tensor([10.0], device)  # other memory: the recording holds no more
    assert replay(Tensor([1.0], device)).item() == 22 and replayed.state_dict()["total"] == 11
    replayed.load_state_dict({**replayed.state_dict(), "total": [20.0]})
    assert replay(Tensor([1.0], device)).item() == 42


def test_modes_are_as_before_after_evaluating(device):
    model = Sequential(Linear(1, 1, device=device), Linear(1, 1, device=device))
    model[0].eval()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for _, module in model.named_modules())
        raise ZeroDivisionError
    assert [module.training for _, module in model.named_modules()] == [True, False, True]


@pytest.mark.parametrize("name", ["", "a.b", "weight", "forward", "training", 3])
def test_names_that_do_not_fit(device, name):
    module = Counting(device)
    state = list(module.state_dict())
    with pytest.raises(ArgumentError, match="name: expected"):
        module.register_buffer(name, Tensor([1.0], device))
    assert list(module.state_dict()) == state


def test_values_that_do_not_fit(device):
    module = Counting(device)
    for value in (3.0, np.ones(1), Parameter([1.0], device)):
        with pytest.raises(ArgumentError, match="expected a Tensor or None for a buffer"):
            module.total = value
        with pytest.raises(ArgumentError, match="expected a Tensor or None for a buffer"):
            module.register_buffer("fresh", value)
        assert "fresh" not in module._buffers
    state = module.state_dict()
    for value in (np.float32(7), 2**31):
        with pytest.raises(ArgumentError, match=r"state_dict\['steps'\]: expected whole numbers within int32"):
            module.load_state_dict({**state, "total": [9.0], "steps": value})
    assert module.state_dict()["total"] == 1
