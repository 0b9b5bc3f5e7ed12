"""Log-sum-exp and the losses beside plain cross-entropy and squared error: NumPy, PyTorch, wrong arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine import CrossEntropyLoss, Tensor
from clcomm.engine import functional as F
from tests.engine.values import drawn

REDUCTIONS = ["mean", "sum", "none"]


@given(data=st.data(), keepdims=st.booleans())
def test_logsumexp_agrees_with_numpy(check_op, data, keepdims):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    axes = tuple(data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True)))
    x = np.random.default_rng(1).uniform(-4, 4, shape).astype(np.float32)
    check_op(
        lambda t: F.logsumexp(t, axes, keepdims), lambda a: np.log(np.exp(a).sum(axes, keepdims=keepdims)), x,
    )  # fmt: skip


def test_logsumexp_of_any_size(device):
    rows = np.float32([[1e30, 1, 2], [-1e30, -1e30, -1e30], [-np.inf] * 3, [np.inf, 1, 2], [np.nan, 1, 2]])
    expected = [1e30, -1e30, -np.inf, np.inf, np.nan]
    np.testing.assert_allclose(F.logsumexp(Tensor(rows, device)).numpy(), expected, rtol=1e-6)


def pair(torch, device, values, targets, ours, theirs):
    """Compare a loss and its gradient with PyTorch's."""
    x, t = Tensor(values, device, requires_grad=True), torch.tensor(values, requires_grad=True)
    result, expected = ours(x, targets), theirs(t, torch.tensor(targets))
    np.testing.assert_allclose(result.numpy(), expected.detach().numpy(), rtol=2e-5, atol=1e-6)
    upstream = drawn(3, *expected.shape)
    result.backward(Tensor(upstream, device))
    expected.backward(torch.tensor(upstream))
    np.testing.assert_allclose(x.grad.numpy(), t.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignored", [None, 3, -100])
def test_cross_entropy_as_pytorch(device, reduction, weighed, smoothing, ignored):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    values, targets = rng.normal(0, 10, (37, 11)).astype(np.float32), rng.integers(0, 11, 37)
    if ignored == -100:
        targets[::5] = -100
    weight = rng.uniform(0, 2, 11).astype(np.float32) if weighed else None
    more = {} if ignored is None else {"ignore_index": ignored}
    ours = CrossEntropyLoss(
        reduction=reduction,
        weight=None if weight is None else Tensor(weight, device),
        label_smoothing=smoothing,
        **more,
    )
    theirs = torch.nn.CrossEntropyLoss(
        None if weight is None else torch.tensor(weight), reduction=reduction, label_smoothing=smoothing, **more
    )
    pair(torch, device, values, targets, ours, theirs)


def test_a_mean_over_no_rows_is_nan_and_ignored_rows_have_no_gradient(device):
    x = Tensor(drawn(1, 3, 4), device, requires_grad=True)
    assert np.isnan(F.cross_entropy(x, np.full(3, -100), ignore_index=-100).item())
    F.cross_entropy(x, np.array([1, -100, 2]), ignore_index=-100).backward()
    gradient = x.grad.numpy()
    assert not gradient[1].any() and gradient[[0, 2]].all()


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_a_target_outside_the_classes_is_an_error(device, loss):
    x = Tensor(np.zeros((2, 4)), device)
    for outside in (4, -1):
        values = np.array([0, outside], np.int32)
        with pytest.raises(ArgumentError, match=f"targets must be 0 to 3, got {outside}"):
            loss(x, Tensor(values, device), reduction="none", ignore_index=-7)
        losses = loss(x, Tensor(values, device, copy=False), reduction="none", ignore_index=-7)
        with pytest.raises(ArgumentError, match=f"targets must be 0 to 3, got {outside}"):
            losses.numpy()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: F.cross_entropy(t(2, 3), np.array([0, 3]), ignore_index=5), "cross_entropy: targets must be 0 to 2"),
        (
            lambda t: F.cross_entropy(t(2, 3), np.array([0, 1]), label_smoothing=2),
            "cross_entropy: expected label_smooth",
        ),
        (
            lambda t: F.cross_entropy(t(2, 3), np.array([0, 1]), weight=t(2)),
            "cross_entropy: expected weight of shape (3,",
        ),
        (lambda t: F.nll_loss(t(3), np.array([0])), "nll_loss: expected rows of classes, (rows, classes), got (3,)"),
        (lambda t: F.nll_loss(t(2, 3), np.array([0])), "nll_loss: expected 2 targets, one for each row of logits"),
        (
            lambda t: F.nll_loss(t(2, 3), np.array([0, 1]), reduction="some"),
            "nll_loss: expected reduction 'mean', 'sum' or 'none'",
        ),
        (lambda t: F.smooth_l1_loss(t(2), t(3)), "smooth_l1_loss: expected two tensors of one shape"),
        (lambda t: F.smooth_l1_loss(t(2), t(2), beta=-1), "smooth_l1_loss: expected beta of at least 0, got -1"),
        (
            lambda t: F.binary_cross_entropy_with_logits(t(2), t(2), weight=t(3, 2)),
            "binary_cross_entropy_with_logits: expected weights that broadcast to (2,), got one for (3, 2)",
        ),
        (
            lambda t: F.binary_cross_entropy_with_logits(t(2), Tensor([1.0, 0.0], t(1).device, requires_grad=True)),
            "binary_cross_entropy_with_logits: target: expected one that needs no gradient; detach() it",
        ),
        (lambda t: F.logsumexp(t(2, 3), 2), "logsumexp: axis 2 does not fit a tensor of shape (2, 3)"),
        (lambda t: F.logsumexp(t(2, 3), (0, -2)), "logsumexp: axis (0, -2) does not fit a tensor of shape (2, 3)"),
    ],
)
def test_wrong_arguments(device, call, message):
    with pytest.raises(ArgumentError) as caught:
        call(lambda *shape: Tensor(np.ones(shape, np.float32), device))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
def test_ignored_targets_and_logits_of_places_are_pytorchs_by_default(torch, device, loss, reduction):
    values, targets = drawn(1, 4, 5, 3, 2), np.random.default_rng(2).integers(0, 5, (4, 3, 2))
    targets[0], targets[1, 0, 0] = -100, -100
    ours, theirs = getattr(F, loss), getattr(torch.nn.functional, loss)
    pair(
        torch, device, values, targets,
        lambda x, y: ours(x, y, reduction=reduction), lambda x, y: theirs(x, y, reduction=reduction),
    )  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(6, 5), (4, 5, 3)])
def test_shares_of_classes_are_pytorchs(torch, device, shape, smoothing, reduction):
    shares = np.random.default_rng(2).dirichlet(np.ones(5), (shape[0], *shape[2:])).astype(np.float32)
    shares, weight = np.ascontiguousarray(np.moveaxis(shares, -1, 1)), np.float32([0.5, 1, 2, 0.1, 3])
    named = {"label_smoothing": smoothing, "reduction": reduction}
    pair(
        torch, device, drawn(1, *shape), shares,
        lambda x, y: F.cross_entropy(x, Tensor(y, device), weight=Tensor(weight, device), **named),
        lambda x, y: torch.nn.functional.cross_entropy(x, y, weight=torch.tensor(weight), **named),
    )  # fmt: skip
