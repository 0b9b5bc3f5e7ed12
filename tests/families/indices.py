"""Elements and slices at indices along a dimension: of every axis, with indices that repeat, and some of none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clcomm.engine import Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from tests.families.family import Family, assert_equal, drawn, leaf, whole_numbers


class Case(NamedTuple):
    """A tensor, the dimension of the indices, and how many there are; `each`: one for each element."""

    shape: tuple[int, ...]
    axis: int
    count: int
    each: bool
    seed: int


def draw(rng: np.random.Generator, longest: int, number: int) -> Case:
    """Draw a tensor of one to four dimensions."""
    shape = tuple(int(n) for n in rng.integers(1, max(3, longest // 2), 1 + number // 2 % 4))
    axis, count = int(rng.integers(len(shape))), int(rng.integers(1, 2 * longest))
    return Case(shape, axis, count, number % 2 == 0, int(rng.integers(1 << 30)))


def check(device: Device, case: Case) -> None:
    """Compare what is gathered with NumPy's, and the sums of the gradients of equal indices."""
    rng, at, length = np.random.default_rng(case.seed), case.axis, case.shape[case.axis]
    sizes = [int(rng.integers(1, n + 1)) for n in case.shape] if case.each else [*case.shape]
    sizes[at] = case.count
    index = rng.integers(-1, length + 1, sizes if case.each else case.count).astype(np.int32)
    whole = (
        index if case.each else np.broadcast_to(index.reshape([-1 if d == at else 1 for d in range(len(sizes))]), sizes)
    )
    is_there = (whole >= 0) & (whole < length)
    host, grad = whole_numbers(case.seed, *case.shape), whole_numbers(case.seed + 1, *sizes)
    places = list(np.indices(sizes))
    places[at] = np.where(is_there, whole, 0)
    x = leaf(device, host)
    op = F.gather if case.each else F.index_select
    y = op(x, at, Tensor(index, device))
    assert_equal(y, np.where(is_there, host[tuple(places)], np.nan), op.__name__)
    y.backward(leaf(device, grad, False))
    expected = np.zeros(case.shape)
    np.add.at(expected, tuple(places), np.where(is_there, grad, 0))
    assert_equal(x.grad, expected, f"{op.__name__}: gradient")


def check_resampling(device: Device, case: Case) -> None:
    """Compare images of twice the size: each side's slices times a matrix of quarters, and back for the gradient."""
    height, width = (case.shape[-2] if len(case.shape) > 1 else 1), case.shape[-1]
    host = whole_numbers(case.seed, *case.shape).reshape(1, -1, height, width)
    sides = _of_twice_the_size(height), _of_twice_the_size(width)
    x, grad = leaf(device, host), whole_numbers(case.seed + 1, *host.shape[:2], 2 * height, 2 * width)
    y = F.interpolate(x, scale_factor=2, mode="bilinear")
    assert_equal(y, sides[0] @ host @ sides[1].T, "resampling")
    y.backward(leaf(device, grad, False))
    assert_equal(x.grad, sides[0].T @ grad @ sides[1], "resampling: gradient")


def _of_twice_the_size(count: int) -> np.ndarray:
    source = np.maximum((np.arange(2 * count) + 0.5) / 2 - 0.5, 0)
    low = np.minimum(source.astype(int), count - 1)
    weights = np.zeros((2 * count, count))
    np.add.at(weights, (np.arange(2 * count), low), 1 - (source - low))
    np.add.at(weights, (np.arange(2 * count), np.minimum(low + 1, count - 1)), source - low)
    return weights


INDICES = Family("indices", drawn(draw), check)
RESAMPLING = Family("resampling", drawn(draw), check_resampling)
