"""Operations in place, and values that are overwritten between forward and backward, beside PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, ReLU, Sequential, Tensor, no_grad
from clcomm.engine import functional as F
from clcomm.optim import SGD

VALUES = np.float32([[1.0, -2.0, 3.0], [0.5, 4.0, -1.5]])
OTHERS = np.float32([[2.0, 0.5, -1.0], [4.0, -3.0, 0.25]])


def leaf(device, values=VALUES) -> Tensor:
    return Tensor(values, device, requires_grad=True)


@pytest.mark.parametrize("form", ["tensor", "number", "row"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv"])
def test_operators_in_place_are_pytorchs(device, name, form):
    torch = pytest.importorskip("torch")
    results = []
    for make in (lambda values: leaf(device, values), lambda values: torch.tensor(values, requires_grad=True)):
        x, y = make(VALUES), make(OTHERS if form == "tensor" else OTHERS[:1])
        other = 1.5 if form == "number" else y
        h = x * 1.0
        other_name = h
        h = getattr(h, f"__i{name}__")(other)
        assert h is other_name
        (h * h).sum().backward()
        results.append([h, x.grad, y.grad])
    for own, theirs in zip(*results, strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:
            np.testing.assert_allclose(own.numpy(), theirs.detach().numpy(), rtol=1e-6)


def test_all_names_and_views_see_the_result(device):
    x = Tensor(VALUES, device)
    flat, detached, name = x.reshape(6), x.detach(), x
    name += 1.0
    for each in (x, flat, detached):
        assert np.array_equal(each.numpy().ravel(), (VALUES + 1).ravel())


def test_earlier_uses_keep_their_gradients(device):
    x = leaf(device)
    h = x * 2.0
    before = h + 1.0  # keeps no values of h
    h *= 3.0
    after = h * 1.0
    (before.sum() + after.sum()).backward()
    assert np.array_equal(x.grad.numpy(), np.full((2, 3), 2 + 6, np.float32))


def test_a_chain_in_place_trains_like_one_without(device):
    def loss_of(model, in_place):
        y = model(Tensor(VALUES, device))
        if in_place:
            y += 1.0
            y *= 0.5
        else:
            y = (y + 1.0) * 0.5
        return F.relu(y).sum()

    models = [
        Sequential(Linear(3, 4, device=device), ReLU(inplace=in_place), Linear(4, 4, device=device))
        for in_place in (True, False)
    ]
    models[1].load_state_dict(models[0].state_dict())
    for model, in_place in zip(models, (True, False), strict=True):
        optimizer = SGD(model, 0.1)
        for _ in range(3):
            loss_of(model, in_place).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, values in models[0].state_dict().items():
        assert np.array_equal(values, models[1].state_dict()[name])


def test_a_parameter_is_trained_by_hand_under_no_grad(device):
    layer = Linear(3, 2, device=device)
    names = dict(layer.named_parameters())
    layer.flat_space()
    before = layer.weight.numpy()
    layer(Tensor(VALUES, device)).sum().backward()
    with no_grad():
        for p in layer.parameters():
            p -= 0.1 * p.grad
    assert names == dict(layer.named_parameters())
    np.testing.assert_allclose(layer.weight.numpy(), before - 0.1 * VALUES.sum(0), rtol=1e-6)


def test_a_gradient_is_scaled_in_place(device):
    layer = Linear(3, 2, device=device)
    layer.flat_space()
    layer(Tensor(VALUES, device)).sum().backward()
    before = layer.weight.grad.numpy()
    layer.weight.grad *= 0.5
    assert np.array_equal(layer.weight.grad.numpy(), before * 0.5)


def test_a_leaf_that_needs_a_gradient_is_refused(device):
    x = leaf(device)
    with pytest.raises(ArgumentError, match="in place: expected a tensor that is no leaf, or no_grad"):
        x += 1.0


def test_a_result_of_another_shape_is_refused(device):
    x = Tensor(VALUES[:1], device)
    with pytest.raises(ArgumentError, match=r"in place: expected a result of shape \(1, 3\), got \(2, 3\)"):
        x += Tensor(VALUES, device)


def step(layer, x):
    SGD(layer, 0.1).step()


OVERWRITES = {
    "a step": step,
    "copy_from": lambda layer, x: layer.weight.copy_from(layer.weight.numpy() + 1),
    "the input's copy_from": lambda layer, x: x.copy_from(VALUES + 1),
    "load_state_dict": lambda layer, x: layer.load_state_dict(layer.state_dict()),
    "in place": lambda layer, x: x.__iadd__(1.0),
    "a view's": lambda layer, x: x.reshape(6).__imul__(2.0),
}


@pytest.mark.parametrize("overwrite", OVERWRITES.values(), ids=OVERWRITES)
def test_backward_refuses_values_that_were_overwritten(device, overwrite):
    layer = Linear(3, 2, device=device)
    layer.flat_space()
    x = Tensor(VALUES, device)
    layer(x).sum().backward()
    loss = (layer(x) * 2.0).sum()
    overwrite(layer, x)
    with pytest.raises(ArgumentError, match=r"backward: Linear kept a tensor of shape \(2, 3\), which was overwritten"):
        loss.backward()
    layer.zero_grad()
    layer(x).sum().backward()  # the next one is right
    np.testing.assert_allclose(layer.weight.grad.numpy(), np.tile(x.numpy().sum(0), (2, 1)), rtol=1e-6)


def test_values_that_backward_does_not_need_may_be_overwritten(device):
    x, bias = leaf(device), leaf(device, OTHERS)
    loss = (x + bias).sum()
    bias.copy_from(VALUES)
    loss.backward()
    assert np.array_equal(bias.grad.numpy(), np.ones((2, 3), np.float32))


def test_tensors_are_compared_with_tensors_and_numbers_alone_and_identity_stays(device):
    x, y = Tensor(VALUES, device), Tensor(VALUES, device)
    assert (x == y).all() and not (x != x).any() and x != None and {x: 1}[x] == 1  # noqa: E711
    for compare, sign in ((lambda: x == VALUES, "=="), (lambda: x != "x", "!="), (lambda: x < [1.0], "<")):
        with pytest.raises(ArgumentError, match=f"{sign}: expected a tensor or a number, got "):
            compare()


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (-1, -2), (0, 2), (2, 1)])
def test_transpose_of_two_dimensions_is_pytorchs(device, dims):
    values = np.arange(24, dtype=np.float32).reshape((4, 6) if max(dims) < 2 else (2, 3, 4))
    assert np.array_equal(Tensor(values, device).transpose(*dims).numpy(), values.swapaxes(*dims))
