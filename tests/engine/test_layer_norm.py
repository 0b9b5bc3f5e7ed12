"""Layer norm: rows that have no spread, NaN, and wrong arguments; tests/families has its values."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F


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
