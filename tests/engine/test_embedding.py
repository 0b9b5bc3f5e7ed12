"""Embedding against NumPy and PyTorch: values, gradients of equal indices, initial values, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Embedding, Generator, Tensor
from clcomm.engine import functional as F


@pytest.mark.parametrize("padding", [None, 0, 3, -1])
def test_the_layer_as_pytorch(device, padding):
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)
    theirs = torch.nn.Embedding(11, 37, padding_idx=padding)
    ours = Embedding(11, 37, padding, device=device, rng=Generator(7))
    assert [name for name, _ in ours.named_parameters()] == ["weight"]
    np.testing.assert_allclose(ours.weight.numpy(), theirs.weight.detach().numpy(), rtol=0, atol=3e-6)
    rng = np.random.default_rng(5)
    indices, upstream = rng.integers(0, 11, (8, 9)), rng.normal(size=(8, 9, 37)).astype(np.float32)
    ours.weight.copy_from(theirs.weight.detach().numpy())
    result, expected = ours(Tensor(indices, device)), theirs(torch.tensor(indices))
    assert np.array_equal(result.numpy(), expected.detach().numpy())
    result.backward(Tensor(upstream, device))
    expected.backward(torch.tensor(upstream))
    np.testing.assert_allclose(ours.weight.grad.numpy(), theirs.weight.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_gradients_add_up_over_two_calls(device):
    table = Tensor(np.zeros((3, 2)), device, requires_grad=True)
    (F.embedding([0, 1, 1], table) * 2.0).sum().backward()
    F.embedding([2, 1], table).sum().backward()
    assert table.grad.numpy().tolist() == [[2, 2], [5, 5], [1, 1]]


@pytest.mark.parametrize("count", [1, 2, 7, 15, 16, 17, 31, 32, 33, 1000])
def test_normal_values_as_pytorch(count):
    torch = pytest.importorskip("torch")
    torch.manual_seed(count)
    ours = Generator(count)
    np.testing.assert_allclose(ours.normal((count,)), torch.empty(count).normal_().numpy(), rtol=0, atol=3e-6)
    after = torch.empty(5).uniform_().numpy()
    assert np.array_equal(ours.uniform((5,), 0, 1), after)  # as many numbers were drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 5], (5, 2)), "expected indices from 0 to 4, got 5"),
        (([-1], (5, 2)), "expected indices from 0 to 4, got -1"),
        (([0.5], (5, 2)), r"expected integer indices, got float64 of shape \(1,\)"),
        (([], (5, 2)), r"expected integer indices, got float64 of shape \(0,\)"),
        (([0], (5,)), r"expected a table \[entries, columns\], got shape \(5,\)"),
        (([0], (5, 2), 5), "expected padding_idx from -5 to 4, got 5"),
    ],
)
def test_wrong_arguments(device, arguments, message):
    indices, shape, *padding = arguments
    with pytest.raises(ArgumentError, match="embedding: " + message):
        F.embedding(indices, Tensor(np.ones(shape), device), *padding)


def test_a_table_of_no_rows(device):
    with pytest.raises(ArgumentError, match="num_embeddings: expected a whole number of at least 1, got 0"):
        Embedding(0, 3, device=device)
    with pytest.raises(ArgumentError, match="padding_idx: expected from -3 to 2, got 3"):
        Embedding(3, 3, 3, device=device)
