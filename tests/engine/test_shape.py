"""reshape, flatten, and the axes that transpose refuses; tests/families has transposes."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor


def test_reshape_and_flatten(check_op):
    x = np.random.default_rng(3).standard_normal((4, 3, 5)).astype(np.float32)
    check_op(lambda t: t.reshape(-1, 15), lambda a: a.reshape(-1, 15), x)
    check_op(lambda t: t.reshape((60,)), lambda a: a.reshape(60), x)
    check_op(lambda t: t.flatten(1), lambda a: a.reshape(4, 15), x)
    check_op(lambda t: t.flatten(), np.ravel, x)
    check_op(lambda t: t.flatten(-1), lambda a: a, x)


def test_reshape_shares_memory(device):
    x = Tensor(np.arange(6.0), device)
    y = x.reshape(2, 3)
    x.copy_from(np.arange(6.0) + 1)
    assert np.array_equal(y.numpy(), [[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize("shape", [(7,), (-1, -1), (0, 6), (-2, 3), (-1, 4), ()])
def test_reshape_that_does_not_fit(device, shape):
    with pytest.raises(ArgumentError, match=r"reshape: 6 elements of shape \(2, 3\) do not fit"):
        Tensor(np.zeros((2, 3)), device).reshape(shape)


def test_wrong_axes(device):
    x = Tensor(np.zeros((2, 3)), device)
    with pytest.raises(ArgumentError, match=r"transpose: axes \(0, 0\)"):
        x.permute(0, 0)
    with pytest.raises(ArgumentError, match=r"transpose: axis 2 does not fit a tensor of shape \(2, 3\)"):
        x.transpose(0, 2)
    with pytest.raises(ArgumentError, match="flatten: axis 2 does not fit"):
        x.flatten(2)
