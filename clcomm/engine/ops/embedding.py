"""Embedding: rows of a table by their indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from clcomm.engine.autograd import Context, Op
from clcomm.engine.tensor import INT32, Tensor, empty, float_tensor
from clcomm.errors import ArgumentError


class EmbeddingOp(Op):
    """table[indices]; backward adds the gradients of equal indices in their order."""

    @staticmethod
    def forward(ctx: Context, table: Tensor, *, indices: Tensor, padding: int) -> Tensor:
        device, (entries, columns), rows = table.device, table.shape, indices.size
        y = empty(device, (*indices.shape, columns))
        kernel = device.kernel("embedding", "embedding")
        device.launch(kernel, *device.row_grid(rows, columns), y, table, indices, entries, rows, columns)
        ctx.indices, ctx.padding = indices, padding
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (table,), indices, dtable = ctx.inputs, ctx.indices, ctx.out(0)
        device, (entries, columns) = table.device, table.shape
        device.launch(device.kernel("elementwise", "fill"), *device.grid(dtable.size), dtable.buffer, 0.0, dtable.size)
        grid = device.row_grid(columns, indices.size) if device.is_cpu else device.grid(columns)
        kernel = device.kernel("embedding", "embedding_grad")
        device.launch(kernel, *grid, dtable, grad, indices, entries, ctx.padding, indices.size, columns)
        return (dtable,)


def embedding(indices: Tensor | np.ndarray, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return the rows of a table [entries, columns] at `indices` (any shape): [*indices.shape, columns].

    Args:
        indices: an int32 tensor, or integers; one outside the table that only the device knows gives NaN.
        table: float32 [entries, columns].
        padding_idx: the row that gets no gradient; a negative one counts from the end.

    Raises ArgumentError for integers outside the table, and for a table of other dimensions.
    """
    if float_tensor("embedding: table", table).ndim != 2:
        raise ArgumentError(f"embedding: expected a table [entries, columns], got shape {table.shape}")
    entries = table.shape[0]
    if padding_idx is not None and not -entries <= padding_idx < entries:
        raise ArgumentError(f"embedding: expected padding_idx from {-entries} to {entries - 1}, got {padding_idx}")
    padding = -1 if padding_idx is None else padding_idx % entries
    return EmbeddingOp.apply(table, indices=_index_tensor(indices, table), padding=padding)


def _index_tensor(indices: Any, table: Tensor) -> Tensor:
    if isinstance(indices, Tensor):
        if indices.dtype != INT32:
            raise ArgumentError(f"embedding: expected int32 indices, got {indices.dtype}")
        _require_rows(indices.known_values, table.shape[0])
        return indices
    array = np.asarray(indices)
    if array.dtype.kind not in "iu" or not array.size:
        raise ArgumentError(f"embedding: expected integer indices, got {array.dtype} of shape {array.shape}")
    _require_rows(array, table.shape[0])
    return Tensor(array.astype(np.int32), table.device)


def _require_rows(values: np.ndarray, entries: int) -> None:
    outside = values[(values < 0) | (values >= entries)]
    if outside.size:
        raise ArgumentError(f"embedding: expected indices from 0 to {entries - 1}, got {outside.flat[0]}")
