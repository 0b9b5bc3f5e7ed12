"""GELU, SiLU and leaky ReLU against NumPy, at the extremes, and against PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine import GELU, LeakyReLU, SiLU, Tensor
from clcomm.engine import functional as F

CUMULATIVE = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)), otypes=[np.float64])
#: Our function and its layer with their options, and the reference.
CASES = {
    "gelu": ({}, GELU, lambda a: a * CUMULATIVE(a)),
    "gelu tanh": (
        {"approximate": "tanh"}, GELU,
        lambda a: 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    ),
    "silu": ({}, SiLU, lambda a: a / (1 + np.exp(-a))),
    "leaky_relu": ({}, LeakyReLU, lambda a: np.where(a > 0, a, 0.01 * a)),
    "leaky_relu steep": ({"negative_slope": 3.0}, LeakyReLU, lambda a: np.where(a > 0, a, 3 * a)),
    "leaky_relu down": ({"negative_slope": -0.5}, LeakyReLU, np.vectorize(lambda a: a if a > 0 else -0.5 * a)),
}  # fmt: skip
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([8191, 8197, 16384, 16411]))


def function(case: str):
    return getattr(F, case.split()[0])


@given(size=SIZES, case=st.sampled_from(sorted(CASES)))
def test_agrees_with_numpy(check_op, size, case):
    options, layer, reference = CASES[case]
    x = np.random.default_rng(size).uniform(-5, 5, size).astype(np.float32)
    x[np.abs(x) < 1e-3] = 0.5  # where leaky ReLU has no derivative, differences say nothing
    check_op(lambda t: function(case)(t, **options), reference, x)
    check_op(layer(**options), reference, x)


@pytest.mark.parametrize("case", sorted(CASES))
def test_far_from_zero_as_pytorch(device, case):
    torch = pytest.importorskip("torch")
    options, _, _ = CASES[case]
    values = np.float32([-3e38, -1e30, -100, -40, -12, -6, -0.0, 0, 6, 12, 40, 100, 1e12, np.nan, 1, 1])
    upstream = np.float32([*range(1, 15), np.nan, np.inf])
    x, theirs = Tensor(values, device, requires_grad=True), torch.tensor(values, requires_grad=True)
    result, expected = function(case)(x, **options), function_of_pytorch(torch, case)(theirs, **options)
    np.testing.assert_allclose(result.numpy(), expected.detach().numpy(), rtol=1e-5, atol=2e-6)
    result.backward(Tensor(upstream, device))
    expected.backward(torch.tensor(upstream))
    ours, others = x.grad.numpy(), theirs.grad.numpy()
    known = np.isfinite(others) | (np.abs(values) < 1e5)  # PyTorch's own cubes and products overflow beyond that
    np.testing.assert_allclose(ours[known], others[known], rtol=1e-5, atol=2e-5)


def function_of_pytorch(torch, case: str):
    return getattr(torch.nn.functional, case.split()[0])


def test_refusals(device):
    with pytest.raises(ArgumentError, match="silu: expected a float32 tensor, got int32"):
        F.silu(Tensor([1, -1], device))
    with pytest.raises(ArgumentError, match="gelu: expected approximate 'none' or 'tanh', got 'erf'"):
        F.gelu(Tensor([1.0], device), "erf")
    with pytest.raises(ArgumentError, match="GELU: expected approximate 'none' or 'tanh', got 'fast'"):
        GELU("fast")
