"""Modules in lists and dicts, and what a Module refuses."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import (
    Linear,
    Module,
    ModuleDict,
    ModuleList,
    MultiheadAttention,
    Parameter,
    ParameterList,
    ReLU,
    Tensor,
)
from clcomm.engine import functional as F
from clcomm.optim import SGD


class Holding(Module):
    def __init__(self, value: object):
        self.first = Linear(2, 2)
        self.held = value


def layers(count: int = 3) -> list[Linear]:
    return [Linear(2, 2) for _ in range(count)]


def test_a_list_has_pytorchs_names_and_methods():
    parts = layers(5)
    found = ModuleList(parts[:2])
    found.append(parts[2]).extend([parts[4]])
    found.insert(3, parts[3])
    assert list(found) == parts and len(found) == 5 and found[-1] is parts[4] and list(found[1:3]) == parts[1:3]
    assert [name for name, _ in Holding(found).named_parameters()][2:4] == ["held.0.weight", "held.0.bias"]
    found[0] = parts[1]
    assert found[0] is parts[1] and "4.bias" in found.state_dict()


def test_a_dict_has_pytorchs_names_and_methods():
    found = ModuleDict({"one": Linear(2, 2), "two": ReLU()})
    found["three"] = Linear(2, 3)
    del found["two"]
    assert list(found) == list(found.keys()) == ["one", "three"] and "two" not in found and len(found) == 2
    assert [name for name, _ in found.named_parameters()] == ["one.weight", "one.bias", "three.weight", "three.bias"]
    assert [name for name, _ in found.items()] == ["one", "three"] and next(iter(found.values())) is found["one"]
    with pytest.raises(ArgumentError, match="ModuleDict: expected a name without a dot"):
        found["a.b"] = ReLU()
    with pytest.raises(ArgumentError, match="ModuleDict: expected the name of no attribute"):
        found["forward"] = ReLU()


def test_a_list_of_parameters_is_trained():
    model = Holding(ParameterList([Parameter(np.ones(2)), Parameter(np.zeros(3))]))
    assert [name for name, _ in model.named_parameters()][2:] == ["held.0", "held.1"]
    optimizer = SGD(model, 1.0)
    (model.held[0].sum() + model.held[1].sum()).backward()
    optimizer.step()
    assert np.array_equal(model.held[0].numpy(), np.zeros(2)) and np.array_equal(model.held[1].numpy(), -np.ones(3))
    with pytest.raises(ArgumentError, match="ParameterList: expected a Parameter in each place, got Tensor"):
        model.held.append(Tensor(np.ones(2)))


@pytest.mark.parametrize(("make", "message"), [
    (layers, "held: expected a ModuleList or a Sequential, whose parameters are found, got a list with 3 others"),
    (lambda: tuple(layers()), "got a tuple with 3 others, the first a Linear"),
    (lambda: {"a": layers(2)}, "got a dict with 2 others"),
    (lambda: [Parameter(np.ones(2))], "held: expected a ParameterList .* got a list with 1 others"),
])  # fmt: skip
def test_layers_in_a_plain_container_are_refused_where_they_would_not_be_trained(make, message):
    for use in (lambda model: SGD(model, 0.1), lambda model: SGD(model.parameters(), 0.1)):
        with pytest.raises(ArgumentError, match=message):
            use(Holding(make()))


def test_a_plain_list_of_registered_layers_and_of_other_things_is_fine():
    model = Holding([1, "two", None])
    model.order = [model.first]
    SGD(model, 0.1)


def test_arguments_that_a_module_does_not_take_are_refused():
    class Typo(Module):
        def __init_(self, width: int):
            self.layer = Linear(width, width)

    for wrong in (lambda: Typo(3), lambda: ReLU(slope=1)):
        with pytest.raises(TypeError, match="argument"):
            wrong()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: MultiheadAttention(8, 2, 1.1), "MultiheadAttention: expected p from 0 to 1, got 1.1"),
    (lambda: MultiheadAttention(8, 2, True, batch_first=True), "dropout: expected a probability, got True"),
    (lambda: F.scaled_dot_product_attention(*[Tensor(np.ones((2, 3)))] * 3, None, True), "dropout_p: expected float"),
])  # fmt: skip
def test_settings_of_attention_that_would_mean_something_else_are_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()
