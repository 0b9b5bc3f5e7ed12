"""Average pooling to a given size, against NumPy in float64 and PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine import AdaptiveAvgPool2d, Tensor
from clcomm.engine import functional as F

SIDES = st.integers(1, 12)


def shares(size: int, out: int) -> np.ndarray:
    """Return the share of each element in each window's mean: [out, size]."""
    held = np.zeros((out, size))
    for i in range(out):
        first, end = i * size // out, -(-(i + 1) * size // out)
        held[i, first:end] = 1 / (end - first)
    return held


@given(height=SIDES, width=SIDES, rows=SIDES, columns=SIDES)
def test_agrees_with_numpy(check_op, height, width, rows, columns):
    x = np.random.default_rng(height).uniform(-3, 3, (2, 3, height, width)).astype(np.float32)
    check_op(
        lambda t: F.adaptive_avg_pool2d(t, (rows, columns)),
        lambda a: shares(height, rows) @ a @ shares(width, columns).T,
        x,
    )


@pytest.mark.parametrize("size", [1, 3, None, (2, None), (None, 5), (9, 4), (3, 2)])
def test_the_layer_as_pytorch(device, size):
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).normal(0, 1, (2, 4, 6, 7)).astype(np.float32)
    x, t = Tensor(values, device, requires_grad=True), torch.tensor(values, requires_grad=True)
    theirs_size = (None, None) if size is None else size
    y, expected = AdaptiveAvgPool2d(size)(x), torch.nn.AdaptiveAvgPool2d(theirs_size)(t)
    np.testing.assert_allclose(y.numpy(), expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    grad = np.random.default_rng(2).normal(0, 1, y.shape).astype(np.float32)
    y.backward(Tensor(grad, device))
    expected.backward(torch.tensor(grad))
    np.testing.assert_allclose(x.grad.numpy(), t.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0, (2, 0), (1, 2, 3), "2", 1.5])
def test_sizes_that_do_not_fit(device, size):
    expected = "None or int or a sequence" if isinstance(size, (str, float)) else "a whole number from 1 up"
    with pytest.raises(ArgumentError, match=f"adaptive_avg_pool2d: output_size: expected {expected}"):
        F.adaptive_avg_pool2d(Tensor(np.ones((1, 1, 4, 4)), device), size)


def test_images_that_do_not_fit(device):
    with pytest.raises(ArgumentError, match=r"expected 4 dimensions \(N, C, H, W\), got shape \(4, 4\)"):
        F.adaptive_avg_pool2d(Tensor(np.ones((4, 4)), device), 1)
