"""gather and index_select against PyTorch: values, gradients of equal indices, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), each=st.booleans())
def test_they_are_pytorchs(device, data, shape, each):
    torch = pytest.importorskip("torch")
    axis, count = data.draw(st.integers(-len(shape), len(shape) - 1)), data.draw(st.integers(1, 9))
    sizes = [data.draw(st.integers(1, n)) for n in shape]
    sizes[axis] = count
    rng = np.random.default_rng(count)
    index = rng.integers(0, shape[axis], sizes if each else count)
    host = rng.standard_normal(shape).astype(np.float32)
    x, theirs = Tensor(host, device, requires_grad=True), torch.tensor(host, requires_grad=True)
    y = (F.gather if each else F.index_select)(x, axis, index)
    expected = (torch.gather if each else torch.index_select)(theirs, axis, torch.tensor(index))
    assert y.shape == tuple(expected.shape) and (y.numpy() == expected.detach().numpy()).all()
    grad = rng.standard_normal(y.shape).astype(np.float32)
    y.backward(Tensor(grad, device))
    expected.backward(torch.tensor(grad))
    np.testing.assert_allclose(x.grad.numpy(), theirs.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: F.gather(x, 2, [[0]]), "gather: axis 2 does not fit a tensor of shape (2, 3)"),
        (lambda x: F.gather(x, 1, [[3]]), "gather: expected indices from 0 to 2, got 3"),
        (lambda x: F.gather(x, 1, [[0], [0], [0]]),
         "gather: expected an index of 2 dimensions, none but 1 larger than of (2, 3), got shape (3, 1)"),
        (lambda x: F.gather(x, 1, [0]),
         "gather: expected an index of 2 dimensions, none but 1 larger than of (2, 3), got shape (1,)"),
        (lambda x: F.gather(x, 0, [[0.5]]), "gather: expected integer indices, got float64 of shape (1, 1)"),
        (lambda x: F.gather(x, 0, x), "gather: expected int32 indices on the device of x, got float32 on "),
        (lambda x: F.index_select(x, 0, [-1]), "index_select: expected indices from 0 to 1, got -1"),
        (lambda x: F.index_select(x, 0, [[0]]), "index_select: expected an index of one dimension, got shape (1, 1)"),
        (lambda x: F.index_select(3, 0, [0]), "index_select: x: expected a Tensor, got 3"),
    ],
)  # fmt: skip
def test_wrong_arguments(device, call, message):
    with pytest.raises(ArgumentError) as caught:
        call(Tensor(np.ones((2, 3)), device))
    assert str(caught.value).startswith(message)
