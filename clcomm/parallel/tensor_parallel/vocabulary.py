"""Embedding and cross-entropy with the vocabulary divided between ranks.

Source: Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.engine import functional as F
from clcomm.engine.autograd import Context, Op
from clcomm.engine.nn.layers import Embedding
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.class_losses import NONE_IGNORED, ClassLoss, check_smoothing
from clcomm.engine.ops.loss import check_reduction
from clcomm.engine.ops.shape import fill
from clcomm.engine.tensor import INT32, Tensor, empty, float_tensor
from clcomm.engine.tensor_methods import note_of, require_below
from clcomm.parallel.exchange import ACTIVATIONS, Exchange
from clcomm.parallel.tensor_parallel.linear import DividedLayer

OUTSIDE = "expected 0 to {}, got {}"


class EmbeddingOfParts(Op):
    """The rows of a table of which each rank has a part; backward needs no exchange."""

    @staticmethod
    def forward(ctx: Context, table: Tensor, *, indices: Tensor, padding: int, ranks: Exchange) -> Tensor:
        device, (entries, columns), count = table.device, table.shape, indices.numel()
        first = ranks.rank * entries
        pending = ranks.sum((*indices.shape, columns), ACTIVATIONS)
        sizes = first, entries, ranks.size * entries, count, columns
        kernel = device.kernel("vocabulary", "embedding_part")
        device.launch(kernel, *device.row_grid(count, columns), pending.own, table, indices, note_of(device), *sizes)
        ctx.indices, ctx.first, ctx.padding = indices, first, padding
        return pending.copied()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (table,), indices, dtable = ctx.inputs, ctx.indices, ctx.out(0)
        device, (entries, columns), count = table.device, table.shape, indices.numel()
        own = empty(device, indices.shape, INT32)
        kernel = device.kernel("vocabulary", "indices_of_part")
        device.launch(kernel, *device.grid(count), own, indices, ctx.first, entries, count)
        fill(dtable, 0.0)
        grid = device.row_grid(columns, count) if device.is_cpu else device.grid(columns)
        kernel = device.kernel("embedding", "embedding_grad")
        padding = ctx.padding - ctx.first if 0 <= ctx.padding - ctx.first < entries else -1
        device.launch(kernel, *grid, dtable, grad, own, entries, padding, count, columns)
        return (dtable,)


class VocabularyParallelEmbedding(DividedLayer, Embedding):
    """An Embedding of which each rank has some rows: indices [...] -> [..., embedding_dim], the same on all ranks."""

    def forward(self, indices: Tensor) -> Tensor:
        entries = self.ranks.size * self.weight.shape[0]
        padding = -1 if self.padding_idx is None else self.padding_idx % entries
        tokens = _integers("embedding", indices, self.weight, entries)
        return EmbeddingOfParts.apply(self.weight, indices=tokens, padding=padding, ranks=self.ranks)


class CrossEntropyOfParts(ClassLoss):
    """Cross-entropy of logits [rows, classes / ranks], each rank holding some classes' columns."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, *, targets: Tensor, smoothing: float, ignored: int, reduction: str, ranks: Exchange
    ) -> Tensor:  # fmt: skip
        device, (rows, columns) = x.device, x.shape
        first, classes = ranks.rank * columns, ranks.size * columns
        smooths = smoothing > 0
        terms = empty(device, (2 + smooths, rows))
        kernel = device.kernel("vocabulary", "part_terms")
        device.launch(kernel, *device.row_grid(rows, columns), terms, x, targets, first, int(smooths), rows, columns)
        terms = ranks.gather(terms, 0, ACTIVATIONS)
        losses, weights, logs = (empty(device, (rows,)) for _ in range(3))
        kernel = device.kernel("vocabulary", "losses_of_parts")
        sizes = smoothing, ignored, ranks.size, classes, rows
        device.launch(kernel, *device.grid(rows), losses, weights, logs, terms, targets, note_of(device), *sizes)
        ctx.targets, ctx.own, ctx.classes = targets, (first, smoothing, ignored), classes
        ctx.save(x, logs)
        return ClassLoss.reduced(ctx, losses, weights, reduction)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, logs = ctx.saved
        device, dx = x.device, ctx.out(0)
        device.launch(
            device.kernel("vocabulary", "losses_of_parts_grad"), *device.row_grid(*x.shape),
            dx, grad, ctx.total, x, logs, ctx.targets, *ctx.own, grad.ndim, int(ctx.divides), ctx.classes, *x.shape,
        )  # fmt: skip
        return (dx,)


def cross_entropy(
    logits: Tensor,
    targets: Tensor | np.ndarray,
    ranks: Exchange,
    reduction: str = "mean",
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of logits divided between the ranks by classes, the same on all ranks.

    The logits are not gathered: ranks exchange two numbers for each row, three with label smoothing.

    Args:
        logits: [..., classes / ranks], the classes from `rank * classes / ranks` on.
        targets: a class for each row, [...], in an int32 tensor or an integer array; the same on all ranks.
        reduction: "mean", over the rows that count, "sum" or "none" (one loss for each row, [rows]).
        ignore_index: a target whose rows count nothing; None: there is none.
        label_smoothing: the share, from 0 to 1, of a uniform distribution in the targets', as `F.cross_entropy` has it.

    Raises:
        ArgumentError: shapes, dtypes or the share do not fit, or a target in an array is not a class; for one in a
            tensor, when the loss, NaN, is read, or its gradients are used.
    """
    check_reduction("cross_entropy", reduction)
    check_smoothing(label_smoothing)
    if float_tensor("cross_entropy: logits", logits).ndim < 2:
        raise ArgumentError(f"cross_entropy: expected rows of classes, [..., classes], got {logits.shape}")
    classes, rows = ranks.size * logits.shape[-1], math.prod(logits.shape[:-1])
    tokens = _integers("cross_entropy: targets", targets, logits, classes, ignore_index)
    if tokens.shape != logits.shape[:-1]:
        raise ArgumentError(f"cross_entropy: expected targets of shape {logits.shape[:-1]}, got {tokens.shape}")
    return CrossEntropyOfParts.apply(
        F.reshape(logits, (rows, logits.shape[-1])), targets=tokens, reduction=reduction, ranks=ranks,
        smoothing=float(label_smoothing), ignored=NONE_IGNORED if ignore_index is None else int(ignore_index),
    )  # fmt: skip


class VocabularyParallelCrossEntropyLoss(Module):
    """`cross_entropy` of logits [..., classes / ranks] against targets [...], as a module."""

    def __init__(
        self,
        comm: Communicator,
        reduction: str = "mean",
        *,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ):
        check_reduction("cross_entropy", reduction)
        check_smoothing(label_smoothing)
        self.comm, self.reduction = comm, reduction
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self._ranks: Exchange | None = None

    def forward(self, logits: Tensor, targets: Tensor | np.ndarray) -> Tensor:  # type: ignore[override]
        if self._ranks is None or self._ranks.device is not logits.device:
            self._ranks = Exchange(self.comm, logits.device)
        return cross_entropy(
            logits, targets, self._ranks, self.reduction, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip


def _integers(name: str, given: Any, like: Tensor, count: int, ignored: int | None = None) -> Tensor:
    """Return indices below `count` as a tensor; an array's are checked."""
    if isinstance(given, Tensor):
        if given.dtype != INT32:
            raise ArgumentError(f"{name}: expected int32, got {given.dtype}")
        require_below(f"{name}: {OUTSIDE}", given, count, ignored, scores=like)
        return given
    array = np.asarray(given)
    if array.dtype.kind not in "iu" or not array.size:
        raise ArgumentError(f"{name}: expected integers, got {array.dtype} of shape {array.shape}")
    require_below(f"{name}: {OUTSIDE}", array, count, ignored)
    return Tensor(array.astype(np.int32), like.device)
