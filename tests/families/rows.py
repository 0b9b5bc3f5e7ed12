"""Row-wise kernels: softmax, losses, layer norm, embedding, sums, means and argmax, of every row length."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.tensor_methods import require_none_noted
from tests.families.family import Family, assert_equal, assert_near, drawn, leaf, whole_numbers


class Rows(NamedTuple):
    """A matrix; `reduction` is that of the losses."""

    rows: int
    columns: int
    reduction: str
    seed: int


def draw_rows(rng: np.random.Generator, longest: int, number: int) -> Rows:
    """Draw a matrix, one in eight of them so large that work-items share it."""
    rows, columns = (int(n) for n in rng.integers(1, 3 * longest, 2))
    if rng.integers(8) == 0 and longest > 20:
        rows, columns = int(rng.integers(1, 40)), int(rng.integers(1, 6000))
    return Rows(rows, columns, ("mean", "none", "sum")[number % 3], int(rng.integers(1 << 30)))


def check_softmax(device: Device, case: Rows) -> None:
    """Compare softmax, log-softmax and cross-entropy with their gradients, all of float64."""
    rng = np.random.default_rng(case.seed)
    host = rng.uniform(-5, 5, (case.rows, case.columns)).astype(np.float32)
    grad = rng.uniform(-1, 1, host.shape).astype(np.float32)
    targets = rng.integers(0, case.columns, case.rows)
    shifted = host.astype(np.float64) - host.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    share = np.exp(logs)
    gradients = share * (grad - (grad * share).sum(1, keepdims=True)), grad - share * grad.sum(1, keepdims=True)
    for op, expected, slope in zip((F.softmax, F.log_softmax), (share, logs), gradients, strict=True):
        x = leaf(device, host)
        y = op(x)
        assert_near(y, expected, op.__name__)
        y.backward(leaf(device, grad, False))
        assert_near(x.grad, slope, f"{op.__name__}: gradient")
    x = leaf(device, host)
    loss = F.cross_entropy(x, Tensor(targets, device), reduction=case.reduction)
    losses = -logs[np.arange(case.rows), targets]
    factor, seed = _of_reduction(case.reduction, case.rows), grad[:, 0] if case.reduction == "none" else grad[0, 0]
    assert_near(loss, losses if case.reduction == "none" else losses.sum() * factor, "cross_entropy")
    loss.backward(Tensor(seed, device))
    one_hot = np.arange(case.columns) == targets[:, None]
    slope = (share - one_hot) * factor
    assert_near(x.grad, slope * np.reshape(seed, (-1, 1)), "cross_entropy: gradient")
    if case.reduction != "none":
        x = leaf(device, host)
        F.cross_entropy(x, Tensor(targets, device), reduction=case.reduction).backward()
        assert_near(x.grad, slope, "cross_entropy: gradient of one loss")


def check_class_losses(device: Device, case: Rows) -> None:
    """Compare log-sum-exp, and cross-entropy and likelihood with weights, smoothing and ignored rows, and gradients."""
    rng = np.random.default_rng(case.seed)
    host = rng.uniform(-5, 5, (case.rows, case.columns)).astype(np.float32)
    logs = host.astype(np.float64)
    sums = np.log(np.exp(logs).sum(1))
    logs -= sums[:, None]
    weight = rng.uniform(0.5, 2, case.columns).astype(np.float32) if case.seed % 2 else None
    smoothing, ignored = (0.0, 0.3)[case.seed // 2 % 2], (None, 1, -100)[case.seed // 4 % 3]
    targets = rng.integers(0, case.columns, case.rows)
    if ignored == -100:
        targets[rng.random(case.rows) < 0.3] = ignored
    given = {"weight": None if weight is None else Tensor(weight, device), "ignore_index": ignored}
    factors = np.ones(case.columns) if weight is None else weight.astype(np.float64)
    counts = targets != ignored if ignored is not None else np.ones(case.rows, bool)
    own = factors[np.where(counts, targets, 0)] * counts
    picked = own[:, None] * (np.arange(case.columns) == targets[:, None])
    even = counts[:, None] * factors / case.columns
    x = leaf(device, host)
    y, grad = F.logsumexp(x), whole_numbers(case.seed, case.rows)
    assert_near(y, sums, "logsumexp")
    y.backward(leaf(device, grad, False))
    assert_near(x.grad, grad[:, None] * np.exp(logs), "logsumexp: gradient")
    mixed = (1 - smoothing) * picked + smoothing * even
    slope = np.exp(logs) * mixed.sum(1, keepdims=True) - mixed
    inputs, named = Tensor(targets.astype(np.int32), device), {"reduction": case.reduction, **given}
    for name, losses, slopes, more in (
        ("cross_entropy", -(mixed * logs).sum(1), slope, {"label_smoothing": smoothing}),
        ("nll_loss", -(picked * host).sum(1), -picked, {}),
    ):
        total = own.sum() if case.reduction == "mean" else 1.0
        if total == 0:
            continue  # NaN, as 0 / 0
        x = leaf(device, host)
        loss = getattr(F, name)(x, inputs, **named, **more)
        assert_near(loss, losses if case.reduction == "none" else losses.sum() / total, name)
        seed = whole_numbers(case.seed, *loss.shape)
        loss.backward(Tensor(seed, device))
        assert_near(x.grad, slopes * np.reshape(seed, (-1, 1)) / total, f"{name}: gradient")


def check_element_losses(device: Device, case: Rows) -> None:
    """Compare the smooth L1 loss and the binary cross-entropy, with and without weights, and their gradients."""
    rng = np.random.default_rng(case.seed)
    hosts = [rng.uniform(-3, 3, (case.rows, case.columns)).astype(np.float32) for _ in range(2)]
    beta, factor = (0.0, 0.5, 1.0)[case.seed % 3], _of_reduction(case.reduction, hosts[0].size)
    x, y = (leaf(device, host) for host in hosts)
    loss = F.smooth_l1_loss(x, y, reduction=case.reduction, beta=beta)
    apart = hosts[0].astype(np.float64) - hosts[1]
    is_small = np.abs(apart) < beta
    losses = np.where(is_small, apart**2 / (2 * (beta or 1)), np.abs(apart) - beta / 2)
    slope = np.where(is_small, apart / (beta or 1), np.sign(apart)) * factor
    assert_near(loss, losses if case.reduction == "none" else losses.sum() * factor, "smooth_l1_loss")
    seed = whole_numbers(case.seed, *loss.shape)
    loss.backward(Tensor(seed, device))
    for each, sign in ((x, 1), (y, -1)):
        assert_near(each.grad, sign * slope * seed, "smooth_l1_loss: gradient")
    target = rng.random(hosts[0].shape).astype(np.float32)
    weights = [
        rng.uniform(0.5, 2, shape).astype(np.float32) if case.seed & bit else None
        for bit, shape in ((1, (case.rows, 1)), (2, (case.columns,)))
    ]
    x = leaf(device, hosts[0])
    given = dict(zip(("weight", "pos_weight"), (w if w is None else Tensor(w, device) for w in weights), strict=True))
    loss = F.binary_cross_entropy_with_logits(x, Tensor(target, device), reduction=case.reduction, **given)
    logit, weight, positive = (
        hosts[0].astype(np.float64),
        *(1.0 if w is None else w.astype(np.float64) for w in weights),
    )
    share = 1 + (positive - 1) * target.astype(np.float64)
    losses = weight * ((1 - target) * logit + share * np.log1p(np.exp(-logit)))
    slope = weight * ((1 - target) - share / (1 + np.exp(logit))) * factor
    assert_near(loss, losses if case.reduction == "none" else losses.sum() * factor, "binary_cross_entropy_with_logits")
    seed = whole_numbers(case.seed, *loss.shape)
    loss.backward(Tensor(seed, device))
    assert_near(x.grad, slope * seed, "binary_cross_entropy_with_logits: gradient")


def check_layer_norm(device: Device, case: Rows) -> None:
    """Compare layer norm without parameters, with a weight, and with a bias too, and all their gradients."""
    rng = np.random.default_rng(case.seed)
    shape, parameters = (case.rows, case.columns), ("sum", "none", "mean").index(case.reduction)
    hosts = [rng.uniform(-3, 3, each).astype(np.float32) for each in (shape, shape[1:], shape[1:])]
    grad = rng.uniform(-1, 1, shape).astype(np.float32)
    exact = [host.astype(np.float64) for host in hosts]
    apart = exact[0] - exact[0].mean(1, keepdims=True)
    scale = 1 / np.sqrt((apart**2).mean(1, keepdims=True) + 0.01)
    normal = apart * scale
    weight, bias = exact[1] if parameters > 0 else 1.0, exact[2] if parameters > 1 else 0.0
    leaves = [leaf(device, host) for host in hosts[: 1 + parameters]]
    y = F.layer_norm(leaves[0], case.columns, *leaves[1:], eps=0.01)
    assert_near(y, normal * weight + bias, "layer_norm")
    y.backward(leaf(device, grad, False))
    up = grad * weight
    slope = scale * (up - up.mean(1, keepdims=True) - normal * (up * normal).mean(1, keepdims=True))
    expected = slope, (grad * normal).sum(0), grad.sum(0, dtype=np.float64)
    for each, gradient, name in zip(leaves, expected, ("data", "weight", "bias"), strict=False):
        assert_near(each.grad, gradient, f"layer_norm: {name} gradient", 3e-5)


def check_embedding(device: Device, case: Rows) -> None:
    """Compare rows of a table and the table's gradient, with indices that repeat, and some of no row."""
    rng = np.random.default_rng(case.seed)
    entries, columns = 1 + case.rows // 2, case.columns
    table, indices = whole_numbers(case.seed, entries, columns), rng.integers(-1, entries + 1, case.rows)
    padding = int(rng.integers(entries)) if case.seed % 2 else None
    t = leaf(device, table)
    y = F.embedding(Tensor(indices.astype(np.int32), device, copy=False), t, padding)
    is_there = (indices >= 0) & (indices < entries)
    with suppress(ArgumentError):  # of an index that is not one of the table, which a read would name
        require_none_noted(device)
    assert_equal(y, np.where(is_there[:, None], table[np.where(is_there, indices, 0)], np.nan), "embedding")
    grad = whole_numbers(case.seed + 1, case.rows, columns)
    y.backward(leaf(device, grad, False))
    expected = np.zeros((entries, columns))
    np.add.at(expected, indices[is_there], grad[is_there])
    if padding is not None:
        expected[padding] = 0
    assert_equal(t.grad, expected, "embedding: gradient")


def check_squared_error(device: Device, case: Rows) -> None:
    """Compare the squared error and both of its gradients."""
    hosts = whole_numbers(case.seed, case.rows, case.columns), whole_numbers(case.seed + 1, case.rows, case.columns)
    x, y = (leaf(device, host) for host in hosts)
    loss = F.mse_loss(x, y, reduction=case.reduction)
    difference, factor = (hosts[0] - hosts[1]).astype(np.float64), _of_reduction(case.reduction, hosts[0].size)
    squares = difference**2
    assert_near(loss, squares if case.reduction == "none" else squares.sum() * factor, "mse_loss")
    seed = whole_numbers(case.seed + 2, *loss.shape)
    loss.backward(Tensor(seed, device))
    for leaf_, sign in ((x, 2), (y, -2)):
        assert_near(leaf_.grad, sign * difference * factor * seed, "mse_loss: gradient")


def _of_reduction(reduction: str, count: int) -> float:
    return 1.0 / count if reduction == "mean" else 1.0


class Reduced(NamedTuple):
    """A tensor and the dimensions that are added up."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    keepdims: bool
    seed: int


def draw_reduced(rng: np.random.Generator, longest: int, number: int) -> Reduced:
    """Draw up to 5 dimensions, one of them long in a third of the cases: around a block, or several."""
    dims = int(rng.integers(1, 6))
    shape = [int(n) for n in rng.integers(1, max(3, longest // dims), dims)]
    if rng.integers(3) == 0 and longest > 20:
        shape = [min(n, 4) for n in shape]
        shape[rng.integers(dims)] = int(rng.choice([255, 256, 257, 300, 513, 4095, 4096, 4097, 4200, 8193]))
    axes = tuple(int(axis) for axis in sorted(rng.permutation(dims)[: rng.integers(0, dims + 1)]))
    axes = axes or tuple(range(dims))  # none are all
    return Reduced(tuple(shape), axes, bool(rng.integers(2)), int(rng.integers(1 << 30)))


def check_reduced(device: Device, case: Reduced) -> None:
    """Compare sum, mean and their gradients, and argmax along the last dimension."""
    host = whole_numbers(case.seed, *case.shape)
    for name in ("sum", "mean"):
        x = leaf(device, host)
        y = getattr(F, name)(x, case.axes, case.keepdims)
        expected = getattr(np, name)(host.astype(np.float64), axis=case.axes, keepdims=case.keepdims)
        compare: Any = assert_equal if name == "sum" else assert_near
        compare(y, expected, name)
        grad = whole_numbers(case.seed + 1, *y.shape)
        y.backward(leaf(device, grad, False))
        kept = [1 if axis in case.axes else n for axis, n in enumerate(case.shape)]
        share = 1.0 if name == "sum" else np.prod(kept) / host.size
        assert_near(x.grad, np.broadcast_to(grad.reshape(kept), case.shape) * share, f"{name}: gradient")
    assert_equal(F.argmax(leaf(device, host), -1), host.argmax(-1), "argmax")


SOFTMAX = Family("softmax", drawn(draw_rows), check_softmax)
CLASS_LOSSES = Family("losses of classes", drawn(draw_rows), check_class_losses)
ELEMENT_LOSSES = Family("losses of elements", drawn(draw_rows), check_element_losses)
EMBEDDING = Family("embedding", drawn(draw_rows), check_embedding)
LAYER_NORM = Family("layer norm", drawn(draw_rows), check_layer_norm)
SQUARED_ERROR = Family("squared error", drawn(draw_rows), check_squared_error)
REDUCTION = Family("reduction", drawn(draw_reduced), check_reduced)
