"""Layer norm against NumPy in float64, PyTorch, and rows that have no spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine import LayerNorm, Tensor
from clcomm.engine import functional as F

EPS = 1e-3


def reference(x: np.ndarray, weight=1.0, bias=0.0, dims: int = 1) -> np.ndarray:
    axes = tuple(range(-dims, 0))
    apart = x - x.mean(axes, keepdims=True)
    return apart / np.sqrt((apart**2).mean(axes, keepdims=True) + EPS) * weight + bias


@given(data=st.data(), parameters=st.integers(0, 2), dims=st.integers(1, 2))
def test_agrees_with_numpy(check_op, data, parameters, dims):
    shape = tuple(data.draw(st.lists(st.integers(1, 19), min_size=dims, max_size=4)))
    rng = np.random.default_rng(len(shape) + parameters)
    arrays = [rng.uniform(-3, 3, each).astype(np.float32) for each in (shape, shape[-dims:], shape[-dims:])]
    check_op(
        lambda x, *rest: F.layer_norm(x, shape[-dims:], *rest, eps=EPS),
        lambda x, *rest: reference(x, *rest, dims=dims),
        *arrays[: 1 + parameters],
        tolerance=2e-5,
    )


@pytest.mark.parametrize("shape", [(1, 1), (1, 1000), (1000, 10), (3, 65), (600, 64), (257, 8), (2, 8191)])
def test_sizes_around_groups_and_blocks(check_op, shape):
    rng = np.random.default_rng(2)
    arrays = [rng.uniform(-3, 3, each).astype(np.float32) for each in (shape, shape[1:], shape[1:])]
    check_op(lambda x, w, b: F.layer_norm(x, shape[1], w, b, EPS), reference, *arrays, tolerance=2e-5)


@pytest.mark.parametrize(("affine", "bias"), [(False, True), (True, False), (True, True)])
def test_the_layer_as_pytorch(device, affine, bias):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    values, upstream = rng.normal(5, 20, (2, 7, 5, 31)).astype(np.float32)
    ours, theirs = (
        kind((5, 31), elementwise_affine=affine, bias=bias, **more)
        for kind, more in ((LayerNorm, {"device": device}), (torch.nn.LayerNorm, {}))
    )
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    x, t = Tensor(values, device, requires_grad=True), torch.tensor(values, requires_grad=True)
    result, expected = ours(x), theirs(t)
    np.testing.assert_allclose(result.numpy(), expected.detach().numpy(), rtol=1e-5, atol=2e-6)
    result.backward(Tensor(upstream, device))
    expected.backward(torch.tensor(upstream))
    np.testing.assert_allclose(x.grad.numpy(), t.grad.numpy(), rtol=1e-4, atol=1e-5)
    for (_, own), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        np.testing.assert_allclose(own.grad.numpy(), other.grad.numpy(), rtol=1e-4, atol=1e-3)


def test_large_equal_values_have_no_spread(device):
    x = np.full((3, 11), 1e6, np.float32)
    assert not F.layer_norm(Tensor(x, device), 11).numpy().any()


def test_nan_stays_in_its_row(device):
    x = np.float32([[1, np.nan, 2], [1, 2, 3], [np.inf, 1, 1]])
    result = F.layer_norm(Tensor(x, device), 3).numpy()
    assert np.isnan(result[[0, 2]]).all() and np.isfinite(result[1]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"normalized_shape": 4}, r"expected x to end in the dimensions \(4,\), got shape \(2, 3\)"),
        ({"normalized_shape": ()}, r"expected x to end in the dimensions \(\)"),
        ({"normalized_shape": 3, "weight": (2,)}, r"expected weight of shape \(3,\), got \(2,\)"),
        ({"normalized_shape": 3, "bias": (3,)}, "expected a weight with the bias, got none"),
        ({"normalized_shape": 3, "eps": -1.0}, "expected eps of at least 0, got -1.0"),
    ],
)
def test_wrong_arguments(device, arguments, message):
    given_tensors = {
        name: Tensor(np.ones(value), device) if name in ("weight", "bias") else value
        for name, value in arguments.items()
    }
    with pytest.raises(ArgumentError, match="layer_norm: " + message):
        F.layer_norm(Tensor(np.ones((2, 3)), device), **given_tensors)
