"""Reductions: bits, NaN, the first of equals, variances; tests/families has sums and means."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F

LONG = {
    "cumsum": (lambda x, device: F.cumsum(Tensor(x, device), 0).numpy()[-1], (1_000_000,)),
    "cumsum of rows": (lambda x, device: F.cumsum(Tensor(x, device), 0).numpy()[-1], (200_000, 3)),
    "Linear": (lambda up, device: _bias(F.linear, np.ones((len(up), 8), np.float32), (5, 8), up, device), (30_000, 5)),
    "batch norm": (
        lambda up, device: _bias(partial(F.batch_norm, training=True), up * up, (4,), up, device), (64, 4, 48, 48),
    ),
    "batch norm of small planes": (
        lambda up, device: _bias(partial(F.batch_norm, training=True), up * up, (4,), up, device), (20_000, 4, 2, 3),
    ),
}  # fmt: skip


def _bias(function, x, weight, up, device):
    """Return the gradient of a bias: the sum of `up` over all but its channels."""
    given = [Tensor(np.zeros(4, np.float32), device), Tensor(np.ones(4, np.float32), device)] if x.ndim == 4 else []
    bias = Tensor(np.zeros(up.shape[1], np.float32), device, requires_grad=True)
    function(Tensor(x, device), *given, Tensor(np.ones(weight, np.float32), device), bias).backward(Tensor(up, device))
    return bias.grad.numpy()


@pytest.mark.parametrize("name", LONG)
def test_rounding_errors_of_long_sums_do_not_add_up(device, name):
    sums, shape = LONG[name]
    x = np.full(shape, 0.1, np.float32) + np.random.default_rng(9).random(shape, np.float32) * np.float32(0.01)
    channels = (0, *range(2, len(shape)))
    np.testing.assert_allclose(
        sums(x, device), x.astype(np.float64).sum(channels), rtol=1e-6 if "cumsum" in name else 4e-7
    )


def test_infinity_in_a_long_sum_stays_infinity(device):
    x = np.ones((300, 2), np.float32)
    x[100, 0] = np.inf
    sums = F.cumsum(Tensor(x, device), 0).numpy()
    assert np.array_equal(sums, np.cumsum(x, 0))
    assert _bias(F.linear, np.ones((300, 8), np.float32), (2, 8), x, device).tolist() == [np.inf, 300]


def test_same_bits_each_time(device):
    x = Tensor(np.random.default_rng(7).standard_normal((300, 1000)).astype(np.float32), device)
    assert all(x.sum(axis).numpy().tobytes() == x.sum(axis).numpy().tobytes() for axis in (None, 0, 1))


def test_nan_and_inf_reach_the_sum(device):
    for size in (3, 100, 5000):
        x = np.ones(size, np.float32)
        x[size // 2] = np.nan
        assert np.isnan(Tensor(x, device).sum().item())
        x[size // 2] = np.inf
        assert Tensor(x, device).mean().item() == np.inf


@given(rows=st.integers(1, 40), columns=st.integers(1, 40))
def test_argmax_takes_the_first_of_equals(device, rows, columns):
    x = np.random.default_rng(8).integers(0, 4, (rows, columns)).astype(np.float32)
    assert np.array_equal(Tensor(x, device).argmax(-1).numpy(), x.argmax(-1))
    x[rows // 2, columns // 2] = np.nan
    assert np.array_equal(Tensor(x, device).argmax(-1).numpy(), x.argmax(-1))


@pytest.mark.parametrize("axis", [2, -3, (0, 0), (0, -2)])
def test_wrong_axis(device, axis):
    with pytest.raises(ArgumentError, match=r"sum: axis .* does not fit a tensor of shape \(2, 3\)"):
        F.sum(Tensor(np.zeros((2, 3)), device), axis)


@given(data=st.data(), keepdims=st.booleans(), correction=st.integers(0, 2))
def test_variance_agrees_with_numpy_over_any_axes(check_op, data, keepdims, correction):
    shape = data.draw(array_shapes(min_dims=1, max_dims=4, min_side=3, max_side=6))
    axis = data.draw(st.none() | st.sets(st.integers(0, len(shape) - 1), min_size=1).map(sorted).map(tuple))
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    check_op(
        lambda t: F.var(t, axis, keepdims=keepdims, correction=correction),
        lambda a: a.var(axis=axis, ddof=correction, keepdims=keepdims),
        x, tolerance=5e-6,
    )  # fmt: skip


def test_variance_as_pytorch(device):
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(6).normal(100, 2, (5, 7, 3)).astype(np.float32)
    for axis in (0, (1, 2), (-1,)):
        for correction in (0, 1):
            x, t = Tensor(values, device, requires_grad=True), torch.tensor(values, requires_grad=True)
            y, expected = x.var(axis, correction=correction), t.var(axis, correction=correction)
            np.testing.assert_allclose(y.numpy(), expected.detach().numpy(), rtol=1e-4)
            F.sum(y).backward()
            expected.sum().backward()
            np.testing.assert_allclose(x.grad.numpy(), t.grad.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("correction", [3, -1])
def test_variance_needs_more_elements_than_the_correction(device, correction):
    with pytest.raises(ArgumentError, match="var: expected a correction below the number of elements, 3, got"):
        F.var(Tensor(np.ones((2, 3)), device), 1, correction=correction)
