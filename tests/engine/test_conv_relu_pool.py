"""Convolution, ReLU and max-pool in one kernel, against PyTorch and against the three operations apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clcomm.engine.device import Device
from clcomm.engine.ops.conv2d import conv2d, conv_relu_pool
from clcomm.engine.ops.pool import max_pool2d
from clcomm.engine.tensor import Tensor
from tests.engine.values import assert_close, drawn


@given(
    images=st.integers(1, 18), channels=st.integers(1, 5), outputs=st.integers(1, 9), height=st.integers(2, 12),
    width=st.sampled_from([4, 5, 14]), kernel_h=st.integers(1, 3), has_bias=st.booleans(),
)  # fmt: skip
@example(images=16, channels=1, outputs=16, height=28, width=28, kernel_h=3, has_bias=True)
@example(images=16, channels=16, outputs=32, height=14, width=14, kernel_h=3, has_bias=True)
def test_conv_relu_pool_agrees_with_pytorch(
    device: Device, images: int, channels: int, outputs: int, height: int, width: int, kernel_h: int, has_bias: bool
) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    hosts = drawn(1, images, channels, height, width), drawn(2, outputs, channels, kernel_h, 3), drawn(3, outputs)
    ours = [Tensor(host, device, requires_grad=True) for host in hosts[: 2 + has_bias]]
    # float64, so that a tie is one: float32 sums in another order can make neighbours equal.
    theirs = [torch.tensor(host, dtype=torch.float64, requires_grad=True) for host in hosts[: 2 + has_bias]]
    result = conv_relu_pool(*ours, padding=(1, 1))
    conv = torch.nn.functional.conv2d(*theirs, padding=1)
    expected = torch.nn.functional.max_pool2d(torch.relu(conv), 2)
    assert_close(result.numpy(), expected.detach().numpy())
    g_host = drawn(4, *result.shape)
    expected.backward(torch.tensor(g_host))
    result.backward(Tensor(g_host, device))
    for our, their in zip(ours, theirs, strict=True):
        assert_close(our.grad.numpy(), their.grad.numpy())


@pytest.mark.parametrize(
    ("x_shape", "outputs"),
    [((67, 1, 28, 28), 6), ((9, 3, 7, 14), 5), ((2, 2, 3, 5), 1), ((1, 1, 2, 100), 2), ((8, 4, 10, 10), 4)],
)
def test_conv_relu_pool_of_data_gives_the_same_gradients(device: Device, x_shape, outputs: int) -> None:
    """Where x needs no gradient, as in a first layer, dy is unpooled inside the weight gradient."""
    x, hosts = drawn(1, *x_shape), (drawn(2, outputs, x_shape[1], 3, 3), drawn(3, outputs))
    grads = []
    for needs_dx in (False, True):
        leaves = [Tensor(host, device, requires_grad=True) for host in hosts]
        y = conv_relu_pool(Tensor(x, device, requires_grad=needs_dx), *leaves, padding=1)
        y.backward(Tensor(drawn(4, *y.shape), device))
        grads.append([leaf.grad.numpy() for leaf in leaves])
    for alone, with_dx in zip(*grads, strict=True):
        assert_close(alone, with_dx)


def test_conv_relu_pool_where_nothing_can_be_fused(device: Device) -> None:
    hosts = drawn(1, 5, 2, 9, 8), drawn(2, 3, 2, 2, 2), drawn(3, 3)
    results = []
    for op in (lambda *t: conv_relu_pool(*t), lambda *t: max_pool2d(conv2d(*t).relu(), 2)):
        leaves = [Tensor(host, device, requires_grad=True) for host in hosts]
        y = op(*leaves)
        y.backward(Tensor(drawn(4, *y.shape), device))
        results.append([y.numpy(), *(leaf.grad.numpy() for leaf in leaves)])
    for fused, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(fused, plain)


def test_conv_relu_pool_keeps_nan_and_the_first_of_equals(device: Device) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    x_host = rng.integers(-1, 2, (9, 1, 6, 7)).astype(np.float32)
    x_host[rng.random(x_host.shape) < 0.05] = np.nan
    w_host = np.ones((1, 1, 1, 1), np.float32)
    ours, theirs = Tensor(x_host, device, requires_grad=True), torch.tensor(x_host, requires_grad=True)
    result = conv_relu_pool(ours, Tensor(w_host, device))
    expected = torch.nn.functional.max_pool2d(torch.relu(theirs), 2)
    np.testing.assert_array_equal(result.numpy(), expected.detach().numpy())
    g_host = drawn(4, *result.shape)
    result.backward(Tensor(g_host, device))
    expected.backward(torch.tensor(g_host))
    np.testing.assert_array_equal(ours.grad.numpy(), theirs.grad.numpy())
