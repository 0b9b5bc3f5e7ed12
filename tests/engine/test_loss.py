"""Cross-entropy and squared error: stability, bad targets, PyTorch; tests/families has their values."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Linear, Replay, Tensor
from clcomm.engine import functional as F
from clcomm.optim import SGD

REDUCTIONS = ["mean", "sum", "none"]


def reduced(values: np.ndarray, reduction: str) -> np.ndarray:
    return values if reduction == "none" else getattr(np, reduction)(values)


def cross_entropy(logits: np.ndarray, targets: np.ndarray, reduction: str) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(targets)), targets]
    return reduced(losses, reduction)


def test_targets_on_the_device_are_the_same(device):
    rng = np.random.default_rng(3)
    logits, targets = Tensor(rng.standard_normal((9, 5)), device), rng.integers(0, 5, 9)
    given_as = [targets, targets.astype(np.uint8), Tensor(targets, device)]
    assert len({F.cross_entropy(logits, given).item() for given in given_as}) == 1


def test_large_logits_stay_finite(device):
    x = Tensor(np.float32([[1e5, 0, -1e5], [0, 1e38, -1e38]]), device, requires_grad=True)
    loss = F.cross_entropy(x, np.array([2, 1]), reduction="none")
    np.testing.assert_allclose(loss.numpy(), [2e5, 0])
    loss.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [[1, 0, -1], [0, 0, 0]])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_as_pytorch(device, reduction):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    values, targets = rng.normal(0, 10, (37, 11)).astype(np.float32), rng.integers(0, 11, 37)
    x, theirs = Tensor(values, device, requires_grad=True), torch.tensor(values, requires_grad=True)
    ours = F.cross_entropy(x, targets, reduction=reduction)
    expected = torch.nn.functional.cross_entropy(theirs, torch.tensor(targets), reduction=reduction)
    np.testing.assert_allclose(ours.numpy(), expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    weights = np.linspace(-1, 1, 37).astype(np.float32) if reduction == "none" else np.float32(0.25)
    ours.backward(Tensor(weights, device))
    expected.backward(torch.tensor(weights))
    np.testing.assert_allclose(x.grad.numpy(), theirs.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_nan_reaches_loss_and_gradient(device):
    values = np.ones((4, 3), np.float32)
    values[2, 1] = np.nan
    x = Tensor(values, device, requires_grad=True)
    loss = F.cross_entropy(x, np.array([0, 1, 2, 0]))
    loss.backward()
    assert np.isnan(loss.item())
    assert np.isnan(x.grad.numpy()).any(1).tolist() == [False, False, True, False]


def test_targets_that_are_no_class(device):
    logits = Tensor(np.zeros((3, 4)), device)
    with pytest.raises(ArgumentError, match="targets must be 0 to 3, got 4"):
        F.cross_entropy(logits, np.array([0, 4, 1]))
    with pytest.raises(ArgumentError, match="targets must be 0 to 3, got -1"):
        F.cross_entropy(logits, np.array([0, -1, 1]))
    for outside in (4, -1):
        values = np.array([0, outside, 1], np.int32)
        with pytest.raises(ArgumentError, match=f"targets must be 0 to 3, got {outside}"):
            F.cross_entropy(logits, Tensor(values, device))
        with pytest.raises(ArgumentError, match=f"targets must be 0 to 3, got {outside}"):
            F.cross_entropy(logits, Tensor(values, device).reshape(3))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 9}])
def test_a_target_that_only_the_device_knows_is_an_error_when_the_loss_is_read(device, reduction, options):
    logits = Tensor(np.zeros((3, 4)), device)
    bad = Tensor(np.array([0, 7, 1], np.int32), device, copy=False)
    good = Tensor(np.array([0, 3, 1], np.int32), device, copy=False)
    for _ in range(2):
        loss = F.cross_entropy(logits, bad, reduction=reduction, **options)
        with pytest.raises(ArgumentError, match="targets must be 0 to 3, got 7"):
            loss.numpy()
        assert np.isfinite(F.cross_entropy(logits, good, reduction=reduction, **options).numpy()).all()


def test_a_replayed_loss_tells_of_a_target_outside_the_classes(device):
    layer = Linear(4, 3, device=device)
    layer.flat_space()

    def step(x, targets):
        loss = F.cross_entropy(layer(x), targets)
        loss.backward()
        return loss

    replay, x = Replay(step), Tensor(np.ones((2, 4)), device)
    good, bad = (Tensor(np.int32(each), device, copy=False) for each in ([1, 2], [1, 5]))
    for _ in range(4):
        replay(x, good)
        layer.zero_grad()
    replayed = replay.replayed
    with pytest.raises(ArgumentError, match="targets must be 0 to 2, got 5"):
        replay(x, bad).item()
    assert replay.replayed == replayed + 1


def test_other_bad_arguments(device):
    logits = Tensor(np.zeros((3, 4)), device)
    with pytest.raises(ArgumentError, match=r"expected 3 targets, .* got shape \(2,\)"):
        F.cross_entropy(logits, np.array([0, 1]))
    with pytest.raises(ArgumentError, match="expected integer targets, got float64"):
        F.cross_entropy(logits, np.array([0.0, 1.0, 2.0]))
    with pytest.raises(ArgumentError, match="expected int32 targets, got float32"):
        F.cross_entropy(logits, Tensor(np.zeros(3), device))
    with pytest.raises(ArgumentError, match=r"expected logits of shape \(rows, classes\), got \(4,\)"):
        F.cross_entropy(Tensor(np.zeros(4), device), np.array([1]))
    with pytest.raises(ArgumentError, match="cross_entropy: expected what follows targets by name, got 'max'"):
        F.cross_entropy(logits, np.array([0, 1, 2]), "max")
    with pytest.raises(ArgumentError, match=r"one shape, got \(3, 4\) and \(4,\)"):
        F.mse_loss(logits, Tensor(np.zeros(4), device))


def test_mse_of_one_tensor_with_itself(device):
    x = Tensor(np.arange(5.0), device, requires_grad=True)
    F.mse_loss(x, x).backward()
    assert np.array_equal(x.grad.numpy(), np.zeros(5))


@pytest.mark.parametrize("loss", ["cross_entropy", "smoothed", "nll", "hidden by an ignored one"])
@pytest.mark.parametrize("way", ["plain", "replayed", "step in a replay"])
def test_a_target_that_only_the_device_knows_is_an_error_where_its_gradients_are_used(device, loss, way):
    layer = Linear(4, 3, device=device)
    optimizer = SGD(layer, 0.1)
    named = {"smoothed": {"label_smoothing": 0.1}, "hidden by an ignored one": {"ignore_index": 9}}.get(loss, {})
    function = F.nll_loss if loss == "nll" else F.cross_entropy

    def step(x, targets):
        function(layer(x), targets, **named).backward()
        if way == "step in a replay":
            optimizer.step()

    run, x = step if way == "plain" else Replay(step), Tensor(np.ones((3, 4)), device)
    good, bad = [1, 2, 0], [1, 7, 0]
    if loss == "hidden by an ignored one":
        good, bad = [1, 2, 9], [1, 7, 9]
    targets = [Tensor(np.int32(each), device, copy=loss == "hidden by an ignored one") for each in (good, bad)]
    for number in range(6):
        if number == 4:
            before = layer.weight.numpy()
            with pytest.raises(ArgumentError, match=r"^loss: targets must be 0 to 2, got 7$"):
                run(x, targets[1])
                assert np.isnan(layer.weight.grad.numpy()).any() and way != "step in a replay"
                optimizer.step()
            np.testing.assert_array_equal(layer.weight.numpy(), before)
        else:
            run(x, targets[0])
            if way != "step in a replay":
                optimizer.step()
        layer.zero_grad()
    assert np.isfinite(layer.weight.numpy()).all()
    assert way == "plain" or run.replayed >= 2, run.refusal


def test_targets_that_the_host_knows_wait_for_nothing(device, monkeypatch):
    layer = Linear(4, 3, device=device)
    optimizer, x = SGD(layer, 0.1), Tensor(np.ones((3, 4)), device)
    F.cross_entropy(layer(x), Tensor([1, 2, -100], device).reshape(3)).backward()
    monkeypatch.setattr(type(device), "read", lambda *_: pytest.fail("a step read from the device"))
    optimizer.step()
