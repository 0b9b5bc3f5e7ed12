"""Max and average pooling of every window, stride, padding and size, on whole numbers with many ties."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from clcomm.engine import functional as F
from clcomm.engine.device import Device
from tests.families.family import Family, assert_equal, assert_near, drawn, leaf, whole_numbers


class Axis(NamedTuple):
    """One direction of a pooling."""

    window: int
    stride: int
    padding: int
    size: int


class Case(NamedTuple):
    """A pooling; `rows` and `columns` are its two directions."""

    images: int
    channels: int
    rows: Axis
    columns: Axis
    seed: int


def axes(longest: int) -> list[Axis]:
    """Return every direction with windows up to 5 and strides up to 4."""
    return [
        Axis(window, stride, padding, size)
        for window in range(1, 6)
        for stride in range(1, 5)
        for padding in range(window // 2 + 1)
        for size in range(1, longest + 1)
        if size + 2 * padding >= window
    ]


def every(rng: np.random.Generator, count: int, longest: int) -> Iterator[Case]:
    """Draw cases; some 1,500 hold each direction as rows and as columns. Each fifth is the kernel for pairs in rows."""
    rows, columns = (rng.permutation(np.array(axes(longest))).tolist() for _ in "rc")
    pair = Axis(2, 2, 0, 2)
    for number in range(count):
        images, channels = int(rng.integers(1, 10)), int(rng.integers(1, 6))
        each = Axis(*rows[number % len(rows)]), Axis(*columns[number % len(columns)])
        if number % 5 == 4:
            each = tuple(pair._replace(size=int(size)) for size in rng.integers(2, 2 * longest, 2))
        yield Case(images, channels, *each, number)


def check(device: Device, case: Case) -> None:
    """Compare both poolings and their gradients."""
    windows, strides, pads, sizes = zip(case.rows, case.columns, strict=True)
    host = whole_numbers(case.seed, case.images, case.channels, *sizes, least=-2, most=2)
    for name in ("max_pool2d", "avg_pool2d"):
        x = leaf(device, host)
        y = getattr(F, name)(x, windows, strides, pads)
        area = windows[0] * windows[1] if name == "avg_pool2d" else 1
        grad = area * whole_numbers(case.seed + 1, *y.shape)
        y.backward(leaf(device, grad, False))
        shares, result = _shares(host, case) if area == 1 and name == "max_pool2d" else _means(host, case)
        assert_equal(y, result.astype(np.float32), name)
        spread = grad[..., None, None] * shares
        assert_equal(x.grad, _added(spread, case, host.shape), f"{name}: gradient")


def _padded(host: np.ndarray, case: Case, filler: float) -> np.ndarray:
    """Return the windows [N, C, out_h, out_w, window_h, window_w]."""
    pads = [(0, 0), (0, 0), *((axis.padding, axis.padding) for axis in (case.rows, case.columns))]
    padded = np.pad(host.astype(np.float64), pads, constant_values=filler)
    windows = sliding_window_view(padded, (case.rows.window, case.columns.window), (2, 3))
    return windows[:, :, :: case.rows.stride, :: case.columns.stride]


def _shares(host: np.ndarray, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return which element of each window gets the gradient of its maximum, the first of equals, and the maxima."""
    windows = _padded(host, case, -np.inf)
    flat = windows.reshape(*windows.shape[:4], -1)
    is_first = np.arange(flat.shape[-1]) == flat.argmax(-1)[..., None]
    return is_first.reshape(windows.shape), flat.max(-1)


def _means(host: np.ndarray, case: Case) -> tuple[np.ndarray, np.ndarray]:
    windows = _padded(host, case, 0.0)
    area = case.rows.window * case.columns.window
    return np.full(windows.shape, 1 / area), (windows.sum((4, 5)).astype(np.float32) / np.float32(area))


def _added(spread: np.ndarray, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    """Return the windows' gradients added up where they lie."""
    (top, left), (height, width) = (case.rows.padding, case.columns.padding), shape[2:]
    padded = np.zeros((*shape[:2], height + 2 * top, width + 2 * left))
    rows, columns = (
        axis.stride * (n - 1) + 1 for axis, n in zip((case.rows, case.columns), spread.shape[2:4], strict=True)
    )
    for i, j in np.ndindex(spread.shape[4:]):
        padded[:, :, i : i + rows : case.rows.stride, j : j + columns : case.columns.stride] += spread[..., i, j]
    return np.round(padded[:, :, top : top + height, left : left + width])


POOLING = Family("pooling", every, check)


class Adaptive(NamedTuple):
    """An average pooling of planes to a size."""

    planes: int
    size: tuple[int, int]
    out: tuple[int, int]
    seed: int


def draw_adaptive(rng: np.random.Generator, longest: int, number: int) -> Adaptive:
    """Draw sizes; in one of two cases the result has more rows or columns than the image."""
    size, out = (tuple(int(n) for n in rng.integers(1, 1 + most, 2)) for most in (longest, longest // (number % 2 + 1)))
    return Adaptive(int(rng.integers(1, 6)), (size[0], size[1]), (out[0], out[1]), int(rng.integers(1 << 30)))


def check_adaptive(device: Device, case: Adaptive) -> None:
    """Compare the means of the windows and their gradient."""
    host = whole_numbers(case.seed, 1, case.planes, *case.size)
    shares = [_adaptive_shares(n, out) for n, out in zip(case.size, case.out, strict=True)]
    x = leaf(device, host)
    y = F.adaptive_avg_pool2d(x, case.out)
    assert_near(y, shares[0] @ host.astype(np.float64) @ shares[1].T, "adaptive_avg_pool2d")
    grad = whole_numbers(case.seed + 1, *y.shape)
    y.backward(leaf(device, grad, False))
    assert_near(x.grad, shares[0].T @ grad.astype(np.float64) @ shares[1], "adaptive_avg_pool2d: gradient")


def _adaptive_shares(size: int, out: int) -> np.ndarray:
    """Return the share of each element in each window's mean: [out, size]."""
    shares = np.zeros((out, size))
    for i in range(out):
        first, end = i * size // out, -(-(i + 1) * size // out)
        shares[i, first:end] = 1 / (end - first)
    return shares


ADAPTIVE_POOLING = Family("adaptive pooling", drawn(draw_adaptive), check_adaptive)
