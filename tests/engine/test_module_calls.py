"""Hooks around calls of modules, their children, and `nn.init`'s values, as PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor, manual_seed, nn
from tests.engine.values import drawn


def test_hooks_are_called_and_replace_what_they_return(torch):
    found = []
    for library, make in ((nn, Tensor), (torch.nn, torch.tensor)):
        model = library.Sequential(library.Linear(3, 4), library.ReLU(), library.Linear(4, 2))
        shapes = []
        handles = [
            model[0].register_forward_hook(lambda _, args, y, kept=shapes: kept.append((args[0].shape, y.shape))),
            model[1].register_forward_pre_hook(lambda _, args, kept=shapes: kept.append(args[0].shape)),
            model[1].register_forward_hook(lambda _, args, y: y * 0.0 + 2.0),
            model[2].register_forward_pre_hook(lambda _, args: args[0] * 0.5),
        ]
        x = make(drawn(1, 5, 3))
        first = model(x).detach().numpy()
        expected = model[2].weight.detach().numpy().sum(1) + model[2].bias.detach().numpy()
        np.testing.assert_allclose(first, np.tile(expected, (5, 1)), rtol=1e-5)
        for handle in handles:
            handle.remove()
        model(x)
        found.append([tuple(map(tuple, each)) if isinstance(each[0], tuple) else tuple(each) for each in shapes])
    assert len(found[0]) == len(found[1]) == 2
    assert str(found[0]) == str(found[1]).replace("torch.Size", "")


def test_modules_are_listed_and_applied_to_in_pytorchs_order(torch):
    orders = []
    for library in (nn, torch.nn):
        model = library.Sequential(library.Linear(2, 3), library.Sequential(library.ReLU(), library.Linear(3, 1)))
        names: list[str] = []
        model.apply(lambda module, kept=names: kept.append(type(module).__name__))
        listed = [type(each).__name__ for each in model.modules()]
        orders.append((names, listed, [name for name, _ in model.named_children()], len(list(model.children()))))
        assert not any(p.requires_grad for p in model.requires_grad_(False).parameters())
    assert orders[0] == orders[1]


@pytest.mark.parametrize("text", [
    "uniform_(w, -1, 2)", "normal_(w, 1, 0.5)", "constant_(w, 3)", "ones_(w)", "zeros_(w)", "xavier_uniform_(w, 2)",
    "xavier_normal_(w)", "kaiming_uniform_(w, 0.2, 'fan_out')", "kaiming_normal_(w, nonlinearity='relu')",
    "kaiming_normal_(w, mode='fan_out', nonlinearity='tanh')",
])  # fmt: skip
def test_values_of_init_are_pytorchs(torch, text):
    shape = (6, 4, 3, 3)
    torch.manual_seed(3)
    manual_seed(3)
    theirs, ours = torch.empty(shape), Tensor(np.zeros(shape, np.float32))
    expected = eval(f"init.{text}", {"init": torch.nn.init, "w": theirs})
    assert eval(f"init.{text}", {"init": nn.init, "w": ours}) is ours
    np.testing.assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-6, atol=1e-6)


def test_methods_of_tensors_and_refusals():
    x = Tensor(drawn(1, 2, 3))
    assert (x.dim(), x.numel(), x.t().shape, x.contiguous()) == (2, 6, (3, 2), x)
    assert x.eq(x).tolist() == [[True] * 3] * 2
    assert x.view_as(Tensor(drawn(1, 6))).shape == (6,)
    assert x.expand_as(Tensor(drawn(1, 4, 2, 3))).shape == (4, 2, 3)
    assert x.requires_grad_().requires_grad
    np.testing.assert_allclose(x.mm(x.t()).numpy(), x.numpy() @ x.numpy().T, rtol=1e-5)
    for call, message in (
        (lambda: nn.init.xavier_uniform_(Tensor([1.0])), r"init: expected a tensor of at least 2 dimensions"),
        (lambda: nn.init.kaiming_normal_(x, mode="in"), "mode: expected 'fan_in' or 'fan_out', got 'in'"),
        (lambda: nn.init.calculate_gain("swish"), "nonlinearity: expected one of linear"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
