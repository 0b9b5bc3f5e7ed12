"""Pooling: ties, NaN, defaults and wrong arguments; tests/families has its values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device
from clcomm.engine.ops.pool import avg_pool2d, max_pool2d
from clcomm.engine.tensor import Tensor

Pair = tuple[int, int]


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Pair, Pair, Pair]:
    """Return image shape, kernel, stride and padding."""
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    sizes = tuple(draw(st.integers(max(1, k - 2 * p), 19)) for k, p in zip(kernel, padding, strict=True))
    return (draw(st.integers(1, 9)), draw(st.integers(1, 5)), *sizes), kernel, stride, padding


def windows(shape: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair):
    """Yield (row, column, slices of the image) of each window."""
    counts = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(shape[2:], kernel, stride, padding, strict=True)]
    for place in np.ndindex(*counts):
        starts = [at * s - p for at, s, p in zip(place, stride, padding, strict=True)]
        yield *place, *(slice(max(0, a), min(n, a + k)) for a, k, n in zip(starts, kernel, shape[2:], strict=True))


def run(device: Device, pool, x_host: np.ndarray, *sizes: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the result, a gradient drawn for it and the input's gradient."""
    x = Tensor(x_host, device, requires_grad=True)
    y = pool(x, *sizes)
    grad = drawn(2, *y.shape)
    y.backward(Tensor(grad, device))
    return y.numpy(), grad, x.grad.numpy()


@given(case=cases(), seed=st.integers(0, 1000))
def test_agrees_with_pytorch_on_ties_nan_and_inf(device: Device, case, seed: int) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    shape, *sizes = case
    rng = np.random.default_rng(seed)
    x_host = rng.integers(-2, 3, shape).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf):
        x_host[rng.random(shape) < 0.05] = value
    for pool, theirs in ((max_pool2d, torch.nn.functional.max_pool2d), (avg_pool2d, torch.nn.functional.avg_pool2d)):
        y, grad, dx = run(device, pool, x_host, *sizes)
        x = torch.tensor(x_host, requires_grad=True)
        expected = theirs(x, *sizes)
        expected.backward(torch.tensor(grad))
        np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 2, 4, 16), (1, 3, 7, 17), (2, 1, 2, 15), (2, 2, 9, 31), (1, 1, 6, 64)])
def test_two_by_two_windows_in_wide_rows(device: Device, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(-2, 3, shape).astype(np.float32)
    x[rng.random(shape) < 0.05] = -np.inf
    y, grad, dx = run(device, max_pool2d, x, (2, 2))
    expected = np.zeros(shape)
    for row, column, *window in windows(shape, (2, 2), (2, 2), (0, 0)):
        part = x[:, :, window[0], window[1]].reshape(*shape[:2], 4)
        np.testing.assert_array_equal(y[:, :, row, column], part.max(-1))
        for n, c in np.ndindex(*shape[:2]):
            first = int(part[n, c].argmax())  # the first of equals
            expected[n, c, 2 * row + first // 2, 2 * column + first % 2] = grad[n, c, row, column]
    np.testing.assert_array_equal(dx, expected)
    x[0, 0, 1, 1] = np.nan
    assert np.isnan(max_pool2d(Tensor(x, device), 2).numpy()[0, 0, 0, 0])


def test_stride_is_the_kernel_by_default(device: Device) -> None:
    x = np.arange(24, dtype=np.float32).reshape(1, 1, 4, 6)
    np.testing.assert_array_equal(max_pool2d(Tensor(x, device), 2).numpy()[0, 0], [[7, 9, 11], [19, 21, 23]])
    np.testing.assert_array_equal(avg_pool2d(Tensor(x, device), (4, 3)).numpy()[0, 0], [[10, 13]])


def test_same_bits_on_any_number_of_cores(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(1, 37, 5, 31, 29)
    first = [part.tobytes() for part in run(device, max_pool2d, x, (3, 3), (2, 2), (1, 1))]
    for units in (1, 3, 16):
        monkeypatch.setattr(device, "compute_units", units)
        assert [part.tobytes() for part in run(device, max_pool2d, x, (3, 3), (2, 2), (1, 1))] == first


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 4, 4), {"kernel_size": 2}, "max_pool2d: x: expected 4 dimensions (N, C, H, W), got shape (3, 4, 4)"),
        ((1, 3, 4, 4), {"kernel_size": 0}, "max_pool2d: kernel_size: expected a whole number from 1 up"),
        ((1, 3, 4, 4), {"kernel_size": 2.5}, "max_pool2d: kernel_size: expected a whole number from 1 up"),
        ((1, 3, 4, 4), {"kernel_size": 2, "stride": 0}, "max_pool2d: stride: expected a whole number from 1 up"),
        ((1, 3, 4, 4), {"kernel_size": 3, "padding": 2}, "max_pool2d: padding: expected at most half of the kernel"),
        ((1, 3, 4, 4), {"kernel_size": (5, 2)}, "max_pool2d: kernel_size: expected a window no larger than the image"),
    ],
)
def test_one_line_says_what_does_not_fit(device: Device, shape, options: dict, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        max_pool2d(Tensor(drawn(1, *shape), device), **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
