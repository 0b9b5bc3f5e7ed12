"""Softmax and log-softmax: drawn shapes, large logits, PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F


def log_softmax(a: np.ndarray, axis: int) -> np.ndarray:
    shifted = a - a.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


@given(data=st.data(), shape=array_shapes(min_dims=1, max_dims=4, max_side=23))
def test_agrees_with_numpy(check_op, data, shape):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = np.random.default_rng(1).uniform(-3, 3, shape).astype(np.float32)
    check_op(lambda t: F.softmax(t, axis), lambda a: np.exp(log_softmax(a, axis)), x)
    check_op(lambda t: F.log_softmax(t, axis), lambda a: log_softmax(a, axis), x)


def test_large_logits_stay_finite(device):
    x = np.float32([[1e4, 0, -1e4], [-3e38, -3e38, -3e38], [3e38, 1, 2], [-np.inf, 0, 0]])
    softmax = F.softmax(Tensor(x, device)).numpy()
    np.testing.assert_allclose(softmax, [[1, 0, 0], [1 / 3] * 3, [1, 0, 0], [0, 0.5, 0.5]], rtol=1e-6)
    logs = F.log_softmax(Tensor(x[:1], device)).numpy()
    np.testing.assert_allclose(logs, [[0, -1e4, -2e4]], rtol=1e-6)


def test_nan_fills_its_row_alone(device):
    x = np.float32([[1, np.nan, 2], [1, 2, 3], [np.inf, 1, 1]])
    for op in (F.softmax, F.log_softmax):
        result = op(Tensor(x, device)).numpy()
        assert np.isnan(result[0]).all() and np.isfinite(result[1]).all() and np.isnan(result[2]).any()


def test_wrong_axis(device):
    with pytest.raises(ArgumentError, match=r"softmax: axis 2 does not fit a tensor of shape \(2, 3\)"):
        F.softmax(Tensor(np.zeros((2, 3)), device), 2)
