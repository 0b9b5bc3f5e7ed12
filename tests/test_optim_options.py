"""Optimizers' options: their ranges, those of groups against torch.optim, and what a state has of them."""

from __future__ import annotations

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Parameter
from clcomm.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RMSProp
from tests.test_optim import device, start_values, take_alike_steps

__all__ = ["device"]  # a fixture


@pytest.mark.parametrize(("make", "options", "message"), [
    (SGD, {"lr": -1}, "lr: expected a number of at least 0, got -1"),
    (SGD, {"lr": float("nan")}, "lr: expected a number of at least 0, got nan"),
    (SGD, {"lr": float("inf")}, "lr: expected a number of at least 0, got inf"),
    (SGD, {"lr": "fast"}, "lr: expected a number of at least 0, got 'fast'"),
    (SGD, {"lr": 1, "momentum": -0.1}, "momentum: expected a number of at least 0"),
    (SGD, {"lr": 1, "nesterov": True}, "nesterov: expected a momentum above 0"),
    (SGD, {"momentum": 0.5, "nesterov": True, "dampening": 0.1}, "dampening: expected 0 with nesterov, got 0.1"),
    (Adam, {"betas": (0.9, 1.0)}, r"betas\[1\]: expected a number from 0 to below 1, got 1.0"),
    (Adam, {"eps": -1e-8}, "eps: expected a number of at least 0"),
    (AdamW, {"weight_decay": -1}, "weight_decay: expected a number of at least 0"),
    (Adadelta, {"rho": 1.5}, "rho: expected a number from 0 to 1, got 1.5"),
    (Adagrad, {"lr_decay": -1.0}, "lr_decay: expected a number of at least 0"),
    (RMSProp, {"alpha": -0.5}, "alpha: expected a number of at least 0"),
])  # fmt: skip
def test_hyper_parameters_outside_their_range(device, make, options, message):
    with pytest.raises(ArgumentError, match=message):
        make([Parameter([1.0], device)], **options)


def test_learning_rate_can_be_set_and_is_checked(device):
    optimizer = SGD([Parameter([1.0], device)], 0.1)
    optimizer.lr = 0.01
    assert optimizer.lr == 0.01
    with pytest.raises(ArgumentError, match=r"lr: expected a number of at least 0, got -0\.5"):
        optimizer.lr = -0.5


def test_options_of_groups_are_their_own(device, torch):
    for make, kind, own in (
        (SGD, "SGD", {"momentum": 0.9, "dampening": 0.4, "maximize": True}),
        (Adam, "Adam", {"amsgrad": True, "betas": (0.5, 0.6)}),
    ):
        parameters = [Parameter(value, device) for value in start_values()]
        tensors = [torch.tensor(value, requires_grad=True) for value in start_values()]
        ours = make([{"params": parameters[:2], **own}, {"params": parameters[2:]}], lr=0.05)
        theirs = getattr(torch.optim, kind)([{"params": tensors[:2], **own}, {"params": tensors[2:]}], lr=0.05)
        for step in range(6):
            if step == 3:
                ours.param_groups[1]["maximize"] = theirs.param_groups[1]["maximize"] = True
                ours.load_state_dict(ours.state_dict())
            take_alike_steps(ours, parameters, theirs, tensors, step)


def test_a_state_lacks_options_that_are_off_and_has_those_that_are_on(device):
    optimizer = Adam([Parameter([1.0], device)])
    state = optimizer.state_dict()
    assert not {"amsgrad", "maximize"} & state.keys()
    optimizer.param_groups[0]["maximize"] = True
    assert optimizer.state_dict()["maximize"] == 1
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["maximize"] == 0
    with pytest.raises(ArgumentError, match=r"got some with \['mean', 'square'\]|expected the entries"):
        Adam([Parameter([1.0], device)], amsgrad=True).load_state_dict(state)
    dampened = SGD([Parameter([1.0], device)], 0.1, dampening=0.5)
    with pytest.raises(ArgumentError, match="momentum: expected one above 0 from the beginning with dampening"):
        dampened.param_groups[0]["momentum"] = 0.9
