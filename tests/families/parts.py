"""Kernels for a part of the vocabulary, with stand-ins for the ranks that have the other parts."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import Tensor
from clcomm.engine.device import Device
from clcomm.engine.tensor import empty
from clcomm.engine.tensor_methods import require_none_noted
from clcomm.parallel.tensor_parallel.vocabulary import CrossEntropyOfParts, EmbeddingOfParts
from tests.families.family import Family, assert_equal, assert_near, drawn, leaf, whole_numbers
from tests.families.rows import Rows, draw_rows

_IGNORED = -100


class _Rank:
    """One rank of several: what it adds to a sum stays as it is, what it gathers are the others' `terms` too."""

    def __init__(self, rank: int, size: int, terms: np.ndarray | None = None):
        self.rank, self.size, self._terms = rank, size, terms

    def sum(self, shape: tuple[int, ...], label: str) -> _Rank:
        self._shape = shape
        return self

    @property
    def own(self) -> Tensor:
        self._own = empty(self._device, self._shape)
        return self._own

    def on(self, device: Device) -> _Rank:
        self._device = device
        return self

    def copied(self) -> Tensor:
        return self._own

    def gather(self, terms: Tensor, axis: int, label: str) -> Tensor:
        kinds = len(self._terms) // self.size
        own = slice(kinds * self.rank, kinds * (self.rank + 1))
        assert_near(terms, self._terms[own], "terms of a part")
        everyone = self._terms.astype(np.float32)
        everyone[own] = terms.numpy()
        return Tensor(everyone, terms.device)


def check_vocabulary(device: Device, case: Rows) -> None:
    """Compare the embedding and the cross-entropy of parts with those of the whole, and their gradients."""
    rng, parts = np.random.default_rng(case.seed), 1 + case.seed % 3
    _check_embedding(device, case, rng, parts)
    _check_loss(device, case, rng, parts)


def _check_embedding(device: Device, case: Rows, rng: np.random.Generator, parts: int) -> None:
    entries, columns = 1 + case.rows // 2, case.columns
    count = parts * entries
    table, indices = whole_numbers(case.seed, count, columns), rng.integers(-1, count + 1, case.rows)
    padding = int(rng.integers(count)) if case.seed % 2 else -1
    is_there = (indices >= 0) & (indices < count)
    grad = whole_numbers(case.seed + 1, case.rows, columns)
    expected = np.zeros((count, columns))
    np.add.at(expected, indices[is_there], grad[is_there])
    if padding >= 0:
        expected[padding] = 0
    for part in range(parts):
        own = slice(part * entries, (part + 1) * entries)
        t = leaf(device, table[own])
        y = EmbeddingOfParts.apply(
            t, indices=Tensor(indices.astype(np.int32), device), padding=padding, ranks=_Rank(part, parts).on(device)
        )
        is_own = (indices >= own.start) & (indices < own.stop)
        rows = np.where(is_own[:, None], table[np.where(is_own, indices, 0)], 0)
        with nullcontext() if is_there.all() else pytest.raises(ArgumentError, match=f"expected 0 to {count - 1}"):
            require_none_noted(device)
        assert_equal(y, np.where(is_there[:, None], rows, np.nan), "embedding of a part")
        y.backward(leaf(device, grad, False))
        assert_equal(t.grad, expected[own], "embedding of a part: gradient")


def _check_loss(device: Device, case: Rows, rng: np.random.Generator, parts: int) -> None:
    rows, each, smoothing = case.rows, case.columns, (0.0, 0.25, 1.0)[case.seed % 5 % 3]
    x = rng.uniform(-5, 5, (rows, parts * each)).astype(np.float32)
    targets = rng.integers(0, parts * each, rows)
    targets[rng.random(rows) < 0.2] = _IGNORED
    counts, classes = targets != _IGNORED, np.maximum(targets, 0)
    exact = x.astype(np.float64)
    logs = np.logaddexp.reduce(exact, 1)
    mixed = np.full(x.shape, smoothing / x.shape[1])
    mixed[np.arange(rows), classes] += 1 - smoothing
    losses = np.where(counts, logs - (mixed * exact).sum(1), 0)
    divisor = np.float64(counts.sum()) if case.reduction == "mean" else 1.0
    blocks = np.split(exact, parts, 1)
    terms = []
    for part, block in enumerate(blocks):
        is_own = (targets >= part * each) & (targets < (part + 1) * each)
        picked = np.where(is_own, block[np.arange(rows), np.where(is_own, targets - part * each, 0)], 0)
        own_logs = np.logaddexp.reduce(block, 1)
        terms += [own_logs, picked, (own_logs[:, None] - block).sum(1)][: 3 if smoothing else 2]
    seed = whole_numbers(case.seed + 2, *((rows,) if case.reduction == "none" else ()))
    slope = np.exp(exact - logs[:, None]) - mixed
    with np.errstate(invalid="ignore"):
        slope = np.where(counts[:, None], slope * (np.broadcast_to(seed, rows) / divisor)[:, None], 0)
        expected = losses if case.reduction == "none" else losses.sum() / divisor
    for part in range(parts):
        own = slice(part * each, (part + 1) * each)
        logits = leaf(device, np.ascontiguousarray(x[:, own]))
        loss = CrossEntropyOfParts.apply(
            logits, targets=Tensor(targets.astype(np.int32), device), smoothing=smoothing, ignored=_IGNORED,
            reduction=case.reduction, ranks=_Rank(part, parts, np.array(terms)),
        )  # fmt: skip
        if counts.any():
            assert_near(loss, expected, "cross-entropy of parts")
        loss.backward(Tensor(seed, device))
        assert_near(logits.grad, slope[:, own], "cross-entropy of parts: gradient")


VOCABULARY = Family("vocabulary of parts", drawn(draw_rows), check_vocabulary)
