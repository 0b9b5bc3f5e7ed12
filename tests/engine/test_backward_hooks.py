"""Hooks that backward calls, of tensors and modules, against PyTorch's: what they see, and what stands for it."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor, nn
from tests.engine.values import assert_close, drawn


def seen_by_tensors(make):
    """Return what hooks of a parameter, a result and one behind a ReLU saw, and gradients with and without them."""
    w, x, seen = make(drawn(0, 3, 3)), make(drawn(1, 4, 3)), []
    w.requires_grad = True

    def doubled(grad):
        seen.append(grad.tolist())
        return grad * 2

    handle = w.register_hook(doubled)
    y = x @ w
    y.register_hook(lambda grad: grad * 3)
    z = y.relu()
    z.register_hook(lambda grad: seen.append(grad.tolist()))
    ((z @ w) * 1.5).sum().backward()
    seen.append(w.grad.tolist())
    (x @ w).sum().backward()
    handle.remove()
    (x @ w).sum().backward()
    return [np.float32(each) for each in (*seen, w.grad.tolist())]


def test_hooks_of_tensors_are_pytorchs(torch):
    for ours, theirs in zip(seen_by_tensors(Tensor), seen_by_tensors(torch.tensor), strict=True):
        assert_close(ours, theirs)


def seen_by_modules(model, make):
    seen = []

    def hook(module, of_arguments, of_results):
        seen.append([None if each is None else np.float32(each.tolist()) for each in (*of_arguments, *of_results)])
        return (of_arguments[0] * 0.5,) if type(module).__name__ == "Tanh" else None

    for each in model:
        each.register_full_backward_hook(hook)
    (model(make(np.ones((2, 3), np.float32))) ** 2).sum().backward()
    return seen, [np.float32(p.grad.tolist()) for p in model.parameters()]


@pytest.mark.filterwarnings("ignore")
def test_hooks_of_modules_are_pytorchs(torch):
    models = [lib.Sequential(lib.Linear(3, 4), lib.Tanh(), lib.ReLU(), lib.Linear(4, 2)) for lib in (nn, torch.nn)]
    models[0].load_state_dict({name: value.numpy() for name, value in models[1].state_dict().items()})
    (ours, gradients), (theirs, expected) = map(seen_by_modules, models, (Tensor, torch.tensor))
    for own, other in zip(ours, theirs, strict=True):
        for a, b in zip(own, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or np.allclose(a, b, rtol=1e-5, atol=1e-6)
    for own, other in zip(gradients, expected, strict=True):
        assert_close(own, other)


def test_what_hooks_cannot_be_is_refused():
    x = Tensor(np.ones((2, 3)), requires_grad=True)
    with pytest.raises(ArgumentError, match="expected a tensor that needs a gradient"):
        Tensor(np.ones(3)).register_hook(print)
    y = x * 2
    y.register_hook(lambda grad: grad[0])
    with pytest.raises(ArgumentError, match=r"expected None or a gradient of shape \(2, 3\), got \(3,\)"):
        y.sum().backward()
    for layer, args, said in (
        (nn.CosineSimilarity(), (x, x), "at most one argument that needs a"),
        (nn.LSTM(3, 4), (Tensor(np.ones((5, 2, 3))),), "expected a module that returns a Tensor, got tuple"),
    ):
        layer.register_full_backward_hook(lambda *given: None)
        with pytest.raises(ArgumentError, match=said):
            layer(*args)
