"""GELU, SiLU and leaky ReLU against NumPy, at the extremes, and against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import GELU, Tensor
from clcomm.engine import functional as F

#: Our function's options.
CASES = {
    "gelu": {}, "gelu tanh": {"approximate": "tanh"}, "silu": {}, "leaky_relu": {},
    "leaky_relu steep": {"negative_slope": 3.0}, "leaky_relu down": {"negative_slope": -0.5},
}  # fmt: skip


def function(case: str):
    return getattr(F, case.split()[0])


@pytest.mark.parametrize("case", sorted(CASES))
def test_far_from_zero_as_pytorch(device, case):
    torch = pytest.importorskip("torch")
    options = CASES[case]
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
