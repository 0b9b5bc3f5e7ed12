"""The tape: order, accumulation, release, hooks, no_grad."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Op, Parameter, Tensor, nn, no_grad
from clcomm.engine import functional as F
from clcomm.engine.modes import is_recording
from tests.engine.values import drawn


@pytest.fixture
def leaf(device):
    return Tensor([1.0, -2.0, 3.0], device, requires_grad=True)


def gradient(tensor: Tensor) -> list[float]:
    assert tensor.grad is not None
    return tensor.grad.numpy().tolist()


def test_a_leaf_used_several_times_sums_its_gradients(leaf):
    (leaf * leaf + leaf * 3 + leaf).sum().backward()
    assert gradient(leaf) == [6, 0, 10]


def test_a_result_used_several_times_sums_its_gradients(leaf):
    double = leaf * 2
    ((double * double) + double + double).sum().backward()
    assert gradient(leaf) == [12, -12, 28]


def test_gradients_shared_between_inputs_are_not_mixed(device):
    a, b = (Tensor([1.0, 2.0], device, requires_grad=True) for _ in range(2))
    total = a + b
    (total + a).sum().backward()
    assert gradient(a) == [2, 2] and gradient(b) == [1, 1]


def test_diamonds_run_each_node_once(leaf):
    x = leaf
    for _ in range(20):
        x = x + x
    x.sum().backward()
    assert gradient(leaf) == [2.0**20] * 3


def test_long_chains_need_no_recursion(leaf):
    x = leaf
    for _ in range(3000):
        x = x + 1.0
    x.sum().backward()
    assert gradient(leaf) == [1, 1, 1]


def test_backward_accumulates_until_cleared(leaf):
    for _ in range(3):
        (leaf * 2).sum().backward()
    assert gradient(leaf) == [6, 6, 6]
    leaf.grad = None
    (leaf * 2).sum().backward()
    assert gradient(leaf) == [2, 2, 2]


def test_a_number_scales_the_seed(leaf):
    (leaf * leaf).sum().backward(0.25)
    assert gradient(leaf) == [0.5, -1, 1.5]


def test_seeds_for_results_with_dimensions(leaf, device):
    (leaf * 2).backward(1.5)
    assert gradient(leaf) == [3, 3, 3]
    leaf.grad = None
    (leaf * 2).backward(Tensor([1.0, 0.0, -1.0], device))
    assert gradient(leaf) == [2, 0, -2]
    with pytest.raises(ArgumentError, match=r"a tensor of shape \(3,\) needs gradient="):
        (leaf * 2).backward()
    with pytest.raises(ArgumentError, match=r"expected a gradient of shape \(3,\), got \(2,\)"):
        (leaf * 2).backward(Tensor([1.0, 2.0], device))


def test_backward_of_a_leaf_itself(leaf, device):
    leaf.backward(Tensor([1.0, 2.0, 3.0], device))
    leaf.backward(1.0)
    assert gradient(leaf) == [2, 3, 4]


def test_second_backward_says_what_to_do(leaf):
    loss = (leaf * leaf).sum()
    loss.backward()
    with pytest.raises(
        ArgumentError, match="this graph ran backward before and released its tensors; run forward again, or"
    ):
        loss.backward()


def test_second_loss_on_a_released_part(leaf):
    shared = leaf * 2
    shared.sum().backward()
    with pytest.raises(ArgumentError, match="run forward again"):
        shared.mean().backward()
    assert gradient(leaf) == [2, 2, 2]


def test_without_any_gradient_needed(device):
    with pytest.raises(ArgumentError, match="this tensor needs no gradient"):
        Tensor([1.0], device).backward()


def test_no_grad_records_nothing(leaf):
    with no_grad():
        assert not is_recording()
        result = leaf * 2
        with no_grad():
            pass
        assert not is_recording()
    assert is_recording() and not result.requires_grad

    @no_grad()
    def evaluate(depth: int) -> Tensor:
        return evaluate(depth - 1) if depth else leaf * 2

    assert not evaluate(2).requires_grad and is_recording()
    with pytest.raises(ZeroDivisionError), no_grad():
        raise ZeroDivisionError
    assert is_recording()


def test_detached_tensors_stop_the_gradient(leaf):
    (leaf * leaf.detach()).sum().backward()
    assert gradient(leaf) == [1, -2, 3]


def test_frozen_inputs_get_none(device):
    frozen, trained = Parameter([2.0], device, requires_grad=False), Parameter([3.0], device)
    (frozen * trained).sum().backward()
    assert frozen.grad is None and gradient(trained) == [2]


def test_saved_tensors_are_released(leaf):
    hidden = F.relu(leaf * 2)
    kept = weakref.ref(hidden)
    loss = (hidden * hidden).sum()
    del hidden
    loss.backward()
    assert kept() is None


def test_a_graph_that_is_dropped_needs_no_collector(leaf):
    gc.disable()
    try:
        result = F.sigmoid(leaf)
        kept = weakref.ref(result)
        del result
        assert kept() is None
    finally:
        gc.enable()


def test_hooks_fire_once_when_the_gradient_is_complete(device):
    early, late = Parameter([1.0, 2.0], device), Parameter([3.0, 4.0], device)
    fired = []
    for name, parameter in (("early", early), ("late", late)):
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, gradient(p))))
    ((early * early) * late + late).sum().backward()
    assert fired == [("late", [2, 5]), ("early", [6, 16])]


def test_hooks_can_be_removed(device):
    parameter, fired = Parameter([1.0], device), []
    remove = parameter.register_post_accumulate_grad_hook(fired.append)
    remove()
    remove()
    (parameter * 2).sum().backward()
    assert not fired


def test_an_op_that_returns_a_wrong_shape_is_named(leaf):
    class Wrong(Op):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            return (grad.reshape(1, 3),)

    with pytest.raises(ArgumentError, match=r"Wrong: backward gave shape \(1, 3\) for an input \(3,\)"):
        Wrong.apply(leaf).backward(1.0)


def test_an_input_may_be_none_and_a_gradient_too(leaf):
    class Half(Op):
        @staticmethod
        def forward(ctx, x, other):
            assert ctx.needs == (True, False)
            return x.detach() * 0.5

        @staticmethod
        def backward(ctx, grad):
            return None, None

    (Half.apply(leaf, None) + leaf).backward(1.0)
    assert gradient(leaf) == [1, 1, 1]


def test_same_bits_each_time(device):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 37, 41)).astype(np.float32)
    results = []
    for _ in range(2):
        x, y = (Tensor(v, device, requires_grad=True) for v in (a, b))
        (F.tanh(x * y) / (1.0 + x * x)).mean().backward()
        results.append(x.grad.numpy().tobytes() + y.grad.numpy().tobytes())
    assert results[0] == results[1]


def test_a_retained_graph_runs_backward_again(device):
    layers = [nn.Conv2d(2, 4, 3, 1, 1, device=device), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(4, device=device),
              nn.Flatten(), nn.Linear(36, 8, device=device), nn.GELU(), nn.LayerNorm(8, device=device)]  # fmt: skip
    model = nn.Sequential(*layers)
    x = Tensor(drawn(0, 3, 2, 6, 6), device, requires_grad=True)
    y = model(x)
    shared = y * y + F.softmax(y, -1)
    loss = F.cross_entropy(shared, np.array([1, 0, 7])) + shared.mean()
    loss.backward(retain_graph=True)
    once = [each.grad.numpy() for each in (x, *model.parameters())]
    for each in (x, *model.parameters()):
        each.grad = None
    loss.backward()
    assert all(np.array_equal(a, each.grad.numpy()) for a, each in zip(once, (x, *model.parameters()), strict=True))
    with pytest.raises(ArgumentError, match="ran backward before"):
        loss.backward()
