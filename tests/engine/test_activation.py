"""ReLU, sigmoid and tanh against NumPy, at the extremes, and against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F

REFERENCES = {
    "relu": lambda a: np.where(a < 0, 0, a),
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "tanh": np.tanh,
}


SIZES = st.one_of(st.integers(1, 70), st.sampled_from([8191, 8197, 16384, 16411]))


def test_extremes(device):
    x = np.float32([-np.inf, -1e30, -100, -0.0, 0, 100, 1e30, np.inf, np.nan])
    relu = F.relu(Tensor(x, device)).numpy()
    assert np.array_equal(relu, [0, 0, 0, 0, 0, 100, np.float32(1e30), np.inf, np.nan], equal_nan=True)
    sigmoid = F.sigmoid(Tensor(x, device)).numpy()
    assert np.allclose(sigmoid, [0, 0, 0, 0.5, 0.5, 1, 1, 1, np.nan], atol=1e-30, equal_nan=True)
    tanh = F.tanh(Tensor(x, device)).numpy()
    assert np.allclose(tanh, [-1, -1, -1, 0, 0, 1, 1, 1, np.nan], atol=2e-7, equal_nan=True)


#: The most ulps that a result is off; tanh's is a quotient below 1.
@pytest.mark.parametrize(("name", "most_ulps"), [("sigmoid", 2.5), ("tanh", 2.5)])
def test_is_within_few_ulps_over_all_magnitudes(device, name, most_ulps):
    x = np.concatenate([np.linspace(-86, 86, 100_003), np.geomspace(1e-30, 1, 50_001)]).astype(np.float32)
    expected = REFERENCES[name](x.astype(np.float64))
    ulp = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(getattr(F, name)(Tensor(x, device)).numpy() - expected) / ulp) < most_ulps


def test_e_to_the_x_from_its_least_to_its_greatest(device):
    edges = np.float32([-np.inf, -1e38, -87, -86.8, 0, 87, 88.7, 88.8, 1e38, np.inf, np.nan])
    silu = F.silu(Tensor(-edges, device)).numpy()  # -x / (1 + e^x)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = -edges.astype(np.float64) / (1 + np.exp(edges.astype(np.float64)))
    np.testing.assert_allclose(silu[1:8], expected[1:8], rtol=3e-7, atol=1e-36)
    assert np.signbit(F.tanh(Tensor(np.float32([-0.0, 0.0]), device)).numpy()).tolist() == [True, False]


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_gradients_as_pytorch_nan_included(device, name):
    torch = pytest.importorskip("torch")
    values = np.float32([-np.inf, -3, -0.0, 0, 2, np.inf, np.nan, 1, 1])
    upstream = np.float32([1, 2, 3, 4, 5, 6, 7, np.nan, np.inf])
    x = Tensor(values, device, requires_grad=True)
    getattr(F, name)(x).backward(Tensor(upstream, device))
    theirs = torch.tensor(values, requires_grad=True)
    getattr(torch, name)(theirs).backward(torch.tensor(upstream))
    np.testing.assert_allclose(x.grad.numpy(), theirs.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_refuses_integers(device):
    with pytest.raises(ArgumentError, match="relu: expected a float32 tensor, got int32"):
        F.relu(Tensor([1, -1], device))
