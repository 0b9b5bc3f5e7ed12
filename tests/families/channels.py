"""Batch norm of every shape, with and without running statistics, in training and with given ones; group norm."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clcomm.engine import Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from tests.families.family import Family, assert_equal, assert_near, drawn, leaf

EPS = 0.01


class Channels(NamedTuple):
    """Images of channels; `parameters` of weight and bias are there, `statistics` says whose these are."""

    shape: tuple[int, ...]
    parameters: int
    statistics: str
    seed: int


def draw_channels(rng: np.random.Generator, longest: int, number: int) -> Channels:
    """Draw images, a row of them, or one number of each channel, which is turned first; all kinds in any 12 cases."""
    images, channels = (int(n) for n in rng.integers(1, longest, 2))
    dims = (2, 0, 1, 2)[number % 4]
    sides = tuple(int(n) for n in rng.integers(1, max(3, longest // 2), dims))
    statistics = ("tracked", "given", "cumulative", "of the batch")[(number + number // 4) % 4]
    if images * int(np.prod(sides)) == 1:
        images = 2
    return Channels((images, channels, *sides), number % 3, statistics, int(rng.integers(1 << 30)))


class _Alike:
    """Two ranks with the same part of the batch, as each of them sees the other."""

    size = 2

    def gather(self, part: Tensor, axis: int, label: str) -> Tensor:
        return F.concat([part, part], axis)

    def weighted(self, x: Tensor, label: str) -> Tensor:
        return x + x


def check_batch_norm(device: Device, case: Channels, ranks: _Alike | None = None) -> None:
    """Compare the result, the gradients and the running statistics with float64's; with `ranks` it always trains."""
    trains = ranks is not None or case.statistics != "given"
    rng = np.random.default_rng(case.seed)
    channels = case.shape[1:2]
    hosts = [rng.uniform(-3, 3, each).astype(np.float32) for each in (case.shape, channels, channels)]
    grad = rng.uniform(-1, 1, case.shape).astype(np.float32)
    means, variances = rng.uniform(-1, 1, channels).astype(np.float32), rng.uniform(1, 2, channels).astype(np.float32)
    running = [leaf(device, each, False) for each in (means, variances)] if case.statistics != "of the batch" else []
    batches = Tensor(np.int32(4), device)
    leaves = [leaf(device, host) for host in hosts[: 1 + case.parameters]]
    y = F.batch_norm(
        leaves[0], *(running or (None, None)), *leaves[1:], *[None] * (2 - case.parameters),
        trains, None if case.statistics == "cumulative" else 0.25, EPS, batches=batches, ranks=ranks,
    )  # fmt: skip
    x, up, (weight, bias) = _rows(hosts[0]), _rows(grad), (each.astype(np.float64) for each in hosts[1:])
    mean, variance = (x.mean(0), x.var(0)) if trains else (means.astype(np.float64), variances.astype(np.float64))
    scale = 1 / np.sqrt(variance + EPS)
    normal = (x - mean) * scale
    factor, shift = weight if case.parameters > 0 else 1.0, bias if case.parameters > 1 else 0.0
    assert_near(y, _back(normal * factor + shift, case.shape), "batch_norm")
    y.backward(leaf(device, grad, False))
    apart = up - up.mean(0) - normal * (up * normal).mean(0) if trains else up
    expected = _back(scale * factor * apart, case.shape), (up * normal).sum(0), up.sum(0)
    for each, gradient, name in zip(leaves, expected, ("x", "weight", "bias"), strict=False):
        assert_near(each.grad, gradient, f"batch_norm: {name} gradient", 5e-5)
    if running:
        share = (0.2 if case.statistics == "cumulative" else 0.25) if trains else 0.0
        unbiased = np.tile(x, (1 if ranks is None else ranks.size, 1)).var(0, ddof=1)
        assert_near(running[0], (1 - share) * means + share * mean, "running mean")
        assert_near(running[1], (1 - share) * variances + share * unbiased, "running variance")
    assert_equal(batches, np.int32(5 if trains and running else 4), "batches")


def _rows(images: np.ndarray) -> np.ndarray:
    """Return a row of all channels for each element of a channel."""
    return np.moveaxis(images.astype(np.float64), 1, -1).reshape(-1, images.shape[1])


def _back(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return rows of channels in the shape of the images."""
    return np.moveaxis(rows.reshape(shape[0], -1, shape[1]), 2, 1).reshape(shape)


def check_group_norm(device: Device, case: Channels) -> None:
    """Compare the result and the gradients with float64's, of a drawn number of groups."""
    rng = np.random.default_rng(case.seed)
    images, channels = case.shape[:2]
    groups = int(rng.choice([n for n in range(1, channels + 1) if channels % n == 0]))
    hosts = [rng.uniform(-3, 3, each).astype(np.float32) for each in (case.shape, channels, channels)]
    grad = rng.uniform(-1, 1, case.shape).astype(np.float32)
    inputs = [leaf(device, host) for host in hosts[: 1 + case.parameters]]
    y = F.group_norm(inputs[0], groups, *inputs[1:], eps=EPS)
    y.backward(leaf(device, grad, False))

    def in_groups(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float64).reshape(images, groups, -1)

    rows, each = in_groups(hosts[0]), (1, channels) + (1,) * (len(case.shape) - 2)
    apart = rows - rows.mean(2, keepdims=True)
    scale = 1 / np.sqrt((apart**2).mean(2, keepdims=True) + EPS)
    normal = apart * scale
    weight = hosts[1].reshape(each) if case.parameters > 0 else np.ones(each)
    expected = normal.reshape(case.shape) * weight + (hosts[2].reshape(each) if case.parameters > 1 else 0.0)
    assert_near(y, expected, "group_norm", 3e-5)
    up = in_groups(grad * weight.astype(np.float64))
    dx = scale * (up - up.mean(2, keepdims=True) - normal * (up * normal).mean(2, keepdims=True))
    others = tuple(d for d in range(len(case.shape)) if d != 1)
    slopes = dx.reshape(case.shape), (grad * normal.reshape(case.shape)).sum(others), grad.sum(others, dtype=np.float64)
    for x, slope, name in zip(inputs, slopes, ("data", "weight", "bias"), strict=False):
        assert_near(x.grad, slope, f"group_norm: {name} gradient", 1e-4)


BATCH_NORM = Family("batch norm", drawn(draw_channels), check_batch_norm)
BATCH_NORM_OF_RANKS = Family(
    "batch norm of ranks", drawn(draw_channels), lambda device, case: check_batch_norm(device, case, _Alike())
)
GROUP_NORM = Family("group norm", drawn(draw_channels), check_group_norm)
