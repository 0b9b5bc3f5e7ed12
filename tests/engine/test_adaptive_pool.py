"""Sizes and images that adaptive pooling refuses; tests/families has its values."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F


@pytest.mark.parametrize("size", [0, (2, 0), (1, 2, 3), "2", 1.5])
def test_sizes_that_do_not_fit(device, size):
    expected = "None or int or a sequence" if isinstance(size, (str, float)) else "a whole number from 1 up"
    with pytest.raises(ArgumentError, match=f"adaptive_avg_pool2d: output_size: expected {expected}"):
        F.adaptive_avg_pool2d(Tensor(np.ones((1, 1, 4, 4)), device), size)


def test_images_that_do_not_fit(device):
    with pytest.raises(ArgumentError, match=r"expected 4 dimensions \(N, C, H, W\), got shape \(4, 4\)"):
        F.adaptive_avg_pool2d(Tensor(np.ones((4, 4)), device), 1)
