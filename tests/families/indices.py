"""Elements and slices at indices along a dimension: of every axis, with indices that repeat, and some of none."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.tensor_methods import require_none_noted
from tests.families.family import Family, assert_equal, assert_near, drawn, leaf, whole_numbers


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
    known_to_the_device_alone = F.to_int(leaf(device, index.astype(np.float32), False))
    y = op(x, at, known_to_the_device_alone)
    with suppress(ArgumentError):  # of an index that is not one of x, which a read would name
        require_none_noted(device)
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


class Labelled(NamedTuple):
    """Sequences of classes, and labels that may repeat, be none, or not fit."""

    steps: int
    samples: int
    classes: int
    longest: int
    joined: bool
    seed: int


def draw_labelled(rng: np.random.Generator, longest: int, number: int) -> Labelled:
    """Draw sequences; every other case has its labels one after the other."""
    steps, samples, classes = (int(rng.integers(least, max(4, longest // 3))) for least in (1, 1, 2))
    return Labelled(steps, samples, classes, int(rng.integers(1, 5)), number % 2 == 1, int(rng.integers(1 << 30)))


def check_labelled(device: Device, case: Labelled) -> None:
    """Compare losses and gradients with sums over all paths in float64, made one label after the other."""
    rng = np.random.default_rng(case.seed)
    x = rng.standard_normal((case.steps, case.samples, case.classes))
    x = (x - np.log(np.exp(x).sum(2, keepdims=True))).astype(np.float32)
    labels = rng.integers(1, case.classes, (case.samples, case.longest)).astype(np.int32)
    lengths, counts = (rng.integers(low, high + 1, case.samples).astype(np.int32) for low, high in (
        (0, case.longest), (1, case.steps)))  # fmt: skip
    lengths[0] = max(lengths[0], 1)
    given = np.concatenate([own[:n] for own, n in zip(labels, lengths, strict=True)]) if case.joined else labels
    logs = leaf(device, x)
    integers = [Tensor(each, device) for each in (given, counts, lengths)]
    losses = F.ctc_loss(logs, *integers, reduction="none", zero_infinity=True)
    losses.backward(leaf(device, np.ones(case.samples, np.float32), False))
    for n in range(case.samples):
        path = [0, *(each for label in labels[n, : lengths[n]] for each in (label, 0))]
        loss, grad = _of_all_paths(x[: counts[n], n].astype(np.float64), path)
        assert_near(losses[n], loss, "ctc", 1e-4)
        assert_near(logs.grad[: int(counts[n]), n], grad, "ctc: gradient", 1e-4)
        assert case.steps == counts[n] or not logs.grad.numpy()[counts[n] :, n].any()


def _of_all_paths(x: np.ndarray, path: list[int]) -> tuple[float, np.ndarray]:
    """Return -log of the paths' probability, and exp(x) less the share of the paths in each class; zeros for none."""
    steps, states = len(x), len(path)
    moves = np.array([
        [a <= b <= a + 1 or (b == a + 2 and path[b] != 0 and path[a] != path[b]) for b in range(states)]
        for a in range(states)
    ], np.float64)  # fmt: skip
    chances, ahead, behind = np.exp(x)[:, path], np.zeros((steps, states)), np.zeros((steps, states))
    ahead[0, :2], behind[-1, -2:] = chances[0, :2], 1.0
    for t in range(1, steps):
        ahead[t] = ahead[t - 1] @ moves * chances[t]
    for t in range(steps - 2, -1, -1):
        behind[t] = moves @ (behind[t + 1] * chances[t + 1])
    total = float((ahead[-1] * behind[-1]).sum())
    if total == 0:
        return 0.0, np.zeros(x.shape)
    shares = np.zeros(x.shape)
    for s, label in enumerate(path):
        shares[:, label] += ahead[:, s] * behind[:, s] / total
    return -float(np.log(total)), np.exp(x) - shares


LABELS = Family("labels of unknown places", drawn(draw_labelled), check_labelled)
INDICES = Family("indices", drawn(draw), check)
RESAMPLING = Family("resampling", drawn(draw), check_resampling)
