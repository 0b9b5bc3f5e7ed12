"""Encodings of gradients: float16, bfloat16, int8 with scales, top-k values with indices, and low-rank factors.

Each is prepared once for fixed memory and then run every step, on the rank's own device if that accepts the arrays,
else by NumPy, with the same bits except for products with factors. Arrays are one-dimensional, except for matrices and
for `rows`, (world_size, elements of a row): the ranks' messages, of which a rank writes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeAlias

import numpy as np

from clcomm.base.host import arrays as host_arrays
from clcomm.comm.transport.reduction import without_warnings

#: Elements that share a scale.
BLOCK = 256
_LARGEST_CHAR = 127
_Arrays = ParamSpec("_Arrays")
#: Runs a prepared encoding or decoding.
Work = Callable[[], None]
#: An encoding device: a method for each function below prepares its call, or returns None for arrays that it does not
#: accept.
Codec: TypeAlias = Any


def prepared(
    codec: Codec | None, by_numpy: Callable[_Arrays, None], *arrays: _Arrays.args, **named: _Arrays.kwargs
) -> Work:
    """Return a call of one of the functions below: on the device of `codec`, if that accepts the arrays."""
    work: Work | None = None if codec is None else getattr(codec, by_numpy.__name__)(*arrays, **named)
    return work or without_warnings(partial(by_numpy, *arrays, **named))


def chars_nbytes(count: int) -> int:
    """Return the bytes of `count` elements as int8: whole blocks, each with a float32 scale."""
    return -(-count // BLOCK) * (BLOCK + 4)


def largest_nbytes(chosen: int, dtype: np.dtype) -> int:
    """Return the bytes of `chosen` elements with their indices."""
    return chosen * (4 + dtype.itemsize)


def to_halves(values: np.ndarray, halves: np.ndarray, divisor: int) -> None:
    """Write `values` / `divisor` to `halves`, float16."""
    halves[...] = values / values.dtype.type(divisor)


def from_halves(halves: np.ndarray, values: np.ndarray) -> None:
    """Write float16 `halves` to `values`."""
    values[...] = halves


def to_bfloat16(values: np.ndarray, halves: np.ndarray, divisor: int) -> None:
    """Write `values` / `divisor` to `halves`, BFLOAT16."""
    halves[...] = host_arrays.to_bfloat16(values / values.dtype.type(divisor))


def from_bfloat16(halves: np.ndarray, values: np.ndarray) -> None:
    """Write BFLOAT16 `halves` to `values`."""
    values[...] = host_arrays.from_bfloat16(halves)


def to_chars(values: np.ndarray, residual: np.ndarray, rows: np.ndarray, row: int) -> None:
    """Pack `values` + `residual` into a row of bytes; the error stays in `residual`."""
    wanted = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    np.add(values, residual, out=wanted.reshape(-1)[: values.size], casting="same_kind")
    # NaN is kept in the scale, so that the mean shows it.
    scales = np.abs(wanted).max(axis=1, initial=0.0) / np.float32(_LARGEST_CHAR)
    quotients = np.rint(wanted / np.where(scales > 0, scales, 1)[:, None])
    numbers = np.clip(np.where(np.isfinite(scales)[:, None], quotients, 0), -_LARGEST_CHAR, _LARGEST_CHAR)
    rows[row, : 4 * scales.size] = scales.view(np.uint8)
    rows[row, 4 * scales.size :] = numbers.astype(np.int8).view(np.uint8).reshape(-1)
    left = (values + residual) - unpack(rows[row], values.size)
    residual[...] = np.where(np.isfinite(left), left, 0)


def mean_of_chars(rows: np.ndarray, out: np.ndarray) -> None:
    """Write the mean of the rows, summed in rank order, to `out`."""
    total = unpack(rows[0], out.size).astype(out.dtype)
    for row in rows[1:]:
        total += unpack(row, out.size)
    total /= len(rows)
    np.copyto(out, total)  # other ranks may already read `out`, so only final values are written


def unpack(packed: np.ndarray, count: int) -> np.ndarray:
    blocks = packed.size // (BLOCK + 4)
    scales = packed[: 4 * blocks].copy().view(np.float32)
    numbers = packed[4 * blocks :].view(np.int8).reshape(blocks, BLOCK)
    return (numbers * scales[:, None]).astype(np.float32).reshape(-1)[:count]


def to_largest(values: np.ndarray, residual: np.ndarray, rows: np.ndarray, row: int) -> None:
    """Pack the largest magnitudes of `values` + `residual` into a row of bytes.

    A row holds as many as fit: first their indices, uint32, then their values. NaN and Inf count as largest; of
    equal ones the first is sent. The rest stays in `residual`.
    """
    wanted = values + residual
    chosen = rows.shape[1] // (4 + wanted.itemsize)
    sizes = np.abs(wanted)
    sizes[np.isnan(sizes)] = np.inf  # always sent, so that every rank sees it
    limit = np.partition(sizes, sizes.size - chosen)[sizes.size - chosen]
    larger, equal = np.flatnonzero(sizes > limit), np.flatnonzero(sizes == limit)
    places = np.sort(np.concatenate([larger, equal[: chosen - larger.size]])).astype(np.uint32)
    rows[row, : 4 * chosen] = places.view(np.uint8)
    rows[row, 4 * chosen :] = wanted[places].view(np.uint8)
    wanted[places] = 0
    residual[...] = np.where(np.isfinite(wanted), wanted, 0)


def mean_of_largest(rows: np.ndarray, out: np.ndarray) -> None:
    """Write the mean of the rows, summed in rank order, to `out`."""
    total = np.zeros_like(out)
    chosen = rows.shape[1] // (4 + out.itemsize)
    for row in rows:
        total[row[: 4 * chosen].copy().view(np.uint32)] += row[4 * chosen :].copy().view(out.dtype)
    total /= len(rows)
    np.copyto(out, total)


# Factors have `rank` rows. Not by BLAS: it starts a thread for each core in every rank, which is 25 times slower on
# 4 ranks and 2 cores. Sums may be in any order.


def times(matrix: np.ndarray, factor: np.ndarray, thin: np.ndarray) -> None:
    """Write `matrix` x `factor`, (rank, columns), to `thin`, (rank, rows)."""
    np.einsum("ij,kj->ki", matrix, factor, out=thin)


def transposed_times(matrix: np.ndarray, factor: np.ndarray, thin: np.ndarray) -> None:
    """Write transposed `matrix` x `factor`, (rank, rows), to `thin`, (rank, columns)."""
    np.einsum("ij,ki->kj", matrix, factor, out=thin)


def outer(first: np.ndarray, second: np.ndarray, matrix: np.ndarray) -> None:
    """Write `first`, (rank, rows), x transposed `second`, (rank, columns), to `matrix`."""
    np.multiply.outer(first[0], second[0], out=matrix)
    for one, other in zip(first[1:], second[1:], strict=True):
        matrix += np.multiply.outer(one, other)
