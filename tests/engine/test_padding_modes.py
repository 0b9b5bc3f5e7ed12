"""Convolutions whose padding is not zeros: those of an array that NumPy pads."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Conv1d, Conv2d, Conv3d, Tensor, nn

NUMPY_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
#: The layer, its kernel, stride, padding, dilation, and the elements before and after in each dimension.
CASES = [
    (Conv1d, 3, 2, 2, 1, [(2, 2)]),
    (Conv1d, 2, 1, "same", 3, [(1, 2)]),
    (Conv2d, (3, 4), 1, (1, 2), 1, [(1, 1), (2, 2)]),
    (Conv2d, (3, 4), 1, "same", 1, [(1, 1), (1, 2)]),
    (Conv2d, 3, (2, 1), "valid", 1, [(0, 0), (0, 0)]),
    (Conv3d, 3, 1, (1, 0, 2), 1, [(1, 1), (0, 0), (2, 2)]),
    (Conv3d, 2, 1, "same", 1, [(0, 1)] * 3),
]


@pytest.mark.parametrize("mode", NUMPY_MODES)
@pytest.mark.parametrize(("layer", "kernel", "stride", "padding", "dilation", "around"), CASES)
def test_a_convolution_pads_by_its_mode(device, mode, layer, kernel, stride, padding, dilation, around):
    padded = layer(2, 3, kernel, stride, padding, dilation, padding_mode=mode, device=device)
    plain = layer(2, 3, kernel, stride, 0, dilation, device=device)
    plain.load_state_dict(padded.state_dict())
    values = np.random.default_rng(0).standard_normal((2, 2, 6, 7, 8)[: 2 + len(around)]).astype(np.float32)
    x = Tensor(values, device, requires_grad=True)
    wide = Tensor(np.pad(values, [(0, 0), (0, 0), *around], NUMPY_MODES[mode]), device)
    result, expected = padded(x), plain(wide)
    np.testing.assert_array_equal(result.numpy(), expected.numpy())
    result.sum().backward(), expected.sum().backward()
    np.testing.assert_array_equal(padded.weight.grad.numpy(), plain.weight.grad.numpy())
    assert x.grad is not None and x.grad.shape == values.shape


def test_refuses(device):
    with pytest.raises(ArgumentError, match="padding_mode: expected 'zeros' or 'reflect' or 'replicate' or 'circular'"):
        nn.Conv1d(2, 3, 3, padding_mode="mirror", device=device)
    with pytest.raises(ArgumentError, match="padding_mode: expected 'zeros', got 'reflect'"):
        nn.ConvTranspose1d(2, 3, 3, padding_mode="reflect", device=device)
    layer = nn.Conv2d(2, 3, 3, 2, "same", padding_mode="reflect", device=device)
    with pytest.raises(ArgumentError, match="'same' with a stride of 1"):
        layer(Tensor(np.ones((1, 2, 6, 6), np.float32), device))
