"""Modes of padding that a convolution refuses; test_as_pytorch has their values."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor, nn


def test_refuses(device):
    with pytest.raises(ArgumentError, match="padding_mode: expected 'zeros' or 'reflect' or 'replicate' or 'circular'"):
        nn.Conv1d(2, 3, 3, padding_mode="mirror", device=device)
    with pytest.raises(ArgumentError, match="padding_mode: expected 'zeros', got 'reflect'"):
        nn.ConvTranspose1d(2, 3, 3, padding_mode="reflect", device=device)
    layer = nn.Conv2d(2, 3, 3, 2, "same", padding_mode="reflect", device=device)
    with pytest.raises(ArgumentError, match="'same' with a stride of 1"):
        layer(Tensor(np.ones((1, 2, 6, 6), np.float32), device))
