"""Activations, layers and losses with PyTorch's names against PyTorch: values, gradients, kinks and NaN."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.engine import Tensor, nn
from clcomm.engine import functional as F
from tests.engine.test_functions import RNG, both

torch = pytest.importorskip("torch")

KINKS = np.float32([-30, -6, -3, -1, -0.5, -0.0, 0, 0.5, 1, 3, 6, 8, 30])
#: Names of both libraries' functions, with arguments behind the tensor.
ACTIVATIONS = [
    ("elu", ()), ("elu", (0.5,)), ("softplus", ()), ("softplus", (2.0, 1.0)), ("mish", ()), ("hardtanh", ()),
    ("hardtanh", (-3.0, 0.5)), ("relu6", ()), ("hardsigmoid", ()), ("hardswish", ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more"), ACTIVATIONS)
def test_activations_are_pytorchs_at_their_kinks_too(name, more):
    values = np.concatenate([KINKS, RNG.uniform(-8, 8, 200).astype(np.float32)])
    result, expected, grad, its = both(
        lambda x: getattr(F if isinstance(x, Tensor) else torch.nn.functional, name)(x, *more), values
    )
    np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(grad.numpy(), its.numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["elu", "hardtanh", "relu6", "hardswish", "mish", "logsigmoid", "threshold"])
def test_nan_passes_through_activations_as_through_pytorchs(name):
    settings = (0.5, -1.0) if name == "threshold" else ()
    values = np.float32([np.nan, np.inf, -np.inf, -0.0, 30, -100])
    result, expected, grad, its = both(
        lambda x: getattr(F if isinstance(x, Tensor) else torch.nn.functional, name)(x, *settings), values
    )
    np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(grad.numpy()[3:], its.numpy()[3:], rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:reduction")  # PyTorch's, of "mean" of kl_div
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "name", ["L1Loss()", "HuberLoss(delta=0.3)", "BCELoss()", "KLDivLoss()", "KLDivLoss(log_target=True)"]
)
def test_losses_are_pytorchs(name, reduction):
    x, y = RNG.uniform(0.01, 1, (2, 4, 6)).astype(np.float32)
    y[0, :2] = 0, 1
    name = name.replace("(", f"(reduction={reduction!r}, ")
    ours, theirs = eval(f"nn.{name}", {"nn": nn}), eval(f"nn.{name}", {"nn": torch.nn})
    result, expected, grad, its = both(
        lambda p: ours(p, Tensor(y)) if isinstance(p, Tensor) else theirs(p, torch.tensor(y)), x
    )
    np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(grad.numpy(), its.numpy(), rtol=1e-5, atol=1e-6)


def test_kl_div_of_a_batch_is_pytorchs():
    x, y = RNG.uniform(0.01, 1, (2, 4, 6)).astype(np.float32)
    ours = F.kl_div(Tensor(x), Tensor(y), reduction="batchmean").item()
    assert ours == pytest.approx(torch.nn.functional.kl_div(*map(torch.tensor, (x, y)), reduction="batchmean").item())


def test_dropout_of_channels_drops_whole_ones():
    layer, x = nn.Dropout2d(0.5), Tensor(np.ones((8, 16, 3, 3), np.float32), requires_grad=True)
    y = layer(x)
    y.sum().backward()
    dropped = y.numpy().reshape(8, 16, 9)
    assert set(np.unique(dropped)) == {0.0, 2.0} and (dropped == dropped[..., :1]).all()
    assert np.array_equal(x.grad.numpy(), y.numpy())
    layer.eval()
    assert layer(x) is x
