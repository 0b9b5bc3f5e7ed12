"""Encodings of gradients: float16, bfloat16, int8 with scales, top-k values with indices, and low-rank factors.

Each is prepared once for fixed memory and then run every step, on the rank's own device if that accepts the arrays,
else by NumPy, with the same bits except for products with factors. Arrays are one-dimensional, except for matrices and
for `rows`, (world_size, elements of a row): the ranks' messages, of which a rank writes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from clcomm.base.host.arrays import aligned_empty, from_bfloat16, to_bfloat16
from clcomm.comm.transport.reduction import without_warnings

#: Elements that share a scale.
BLOCK = 256
_LARGEST_CHAR = 127
#: Runs a prepared encoding or decoding.
Work = Callable[[], None]


class Codec(Protocol):
    """An encoding device; each method returns None for arrays that it does not accept."""

    def to_halves(self, values: np.ndarray, halves: np.ndarray, divisor: int) -> Work | None: ...

    def from_halves(self, halves: np.ndarray, values: np.ndarray) -> Work | None: ...

    def to_bfloat16(self, values: np.ndarray, halves: np.ndarray, divisor: int) -> Work | None: ...

    def from_bfloat16(self, halves: np.ndarray, values: np.ndarray) -> Work | None: ...

    def to_chars(self, values: np.ndarray, residual: np.ndarray, rows: np.ndarray, row: int) -> Work | None: ...

    def mean_of_chars(self, rows: np.ndarray, out: np.ndarray) -> Work | None: ...

    def to_largest(self, values: np.ndarray, residual: np.ndarray, rows: np.ndarray, row: int) -> Work | None: ...

    def mean_of_largest(self, rows: np.ndarray, out: np.ndarray, total: np.ndarray) -> Work | None: ...

    def times(self, matrix: np.ndarray, factor: np.ndarray, thin: np.ndarray) -> Work | None: ...

    def transposed_times(self, matrix: np.ndarray, factor: np.ndarray, thin: np.ndarray) -> Work | None: ...

    def outer(self, first: np.ndarray, second: np.ndarray, matrix: np.ndarray) -> Work | None: ...


class NoCodec:
    """Accepts no arrays, so that NumPy encodes."""

    def _not_accepted(self, *arrays: object) -> None:
        return None

    to_halves = from_halves = to_bfloat16 = from_bfloat16 = to_chars = mean_of_chars = _not_accepted
    to_largest = mean_of_largest = times = transposed_times = outer = _not_accepted


class Coding:
    """Prepares encoding and decoding on the device of `codec`, if that accepts the arrays, else by NumPy."""

    def __init__(self, codec: Codec | None):
        self._codec: Codec = NoCodec() if codec is None else codec

    def to_halves(self, values: np.ndarray, halves: np.ndarray, divisor: int) -> Work:
        """Return a function that writes `values` / `divisor` to `halves`, float16."""
        work = self._codec.to_halves(values, halves, divisor)
        return work or without_warnings(partial(_to_halves, values, halves, divisor))

    def from_halves(self, halves: np.ndarray, values: np.ndarray) -> Work:
        """Return a function that writes float16 `halves` to `values`."""
        return self._codec.from_halves(halves, values) or partial(np.copyto, values, halves)

    def to_bfloat16(self, values: np.ndarray, halves: np.ndarray, divisor: int) -> Work:
        """Return a function that writes `values` / `divisor` to `halves`, BFLOAT16."""
        work = self._codec.to_bfloat16(values, halves, divisor)
        return work or without_warnings(partial(_to_bfloat16, values, halves, divisor))

    def from_bfloat16(self, halves: np.ndarray, values: np.ndarray) -> Work:
        """Return a function that writes BFLOAT16 `halves` to `values`."""
        return self._codec.from_bfloat16(halves, values) or partial(_from_bfloat16, halves, values)

    def to_chars(self, values: np.ndarray, residual: np.ndarray, rows: np.ndarray, row: int) -> Work:
        """Return a function that packs `values` + `residual` into a row of bytes; the error stays in `residual`."""
        work = self._codec.to_chars(values, residual, rows, row)
        return work or without_warnings(partial(_to_chars, values, residual, rows[row]))

    def mean_of_chars(self, rows: np.ndarray, out: np.ndarray) -> Work:
        """Return a function that writes the mean of the rows, summed in rank order, to `out`."""
        work = self._codec.mean_of_chars(rows, out)
        return work or without_warnings(partial(_mean_of, partial(unpack, count=out.size), rows, out))

    def to_largest(self, values: np.ndarray, residual: np.ndarray, rows: np.ndarray, row: int) -> Work:
        """Return a function that packs the largest magnitudes of `values` + `residual` into a row of bytes.

        A row holds as many as fit: first their indices, uint32, then their values. NaN and Inf count as largest; of
        equal ones the first is sent. The rest stays in `residual`.
        """
        work = self._codec.to_largest(values, residual, rows, row)
        return work or without_warnings(partial(_to_largest, values, residual, rows[row]))

    def mean_of_largest(self, rows: np.ndarray, out: np.ndarray) -> Work:
        """Return a function that writes the mean of the rows, summed in rank order, to `out`."""
        total = aligned_empty(out.shape, out.dtype)
        work = self._codec.mean_of_largest(rows, out, total)
        return work or without_warnings(partial(_mean_of_largest, rows, out, total))

    # Factors have `rank` rows. Not by BLAS: it starts a thread for each core in every rank, which is 25 times slower on
    # 4 ranks and 2 cores. Sums may be in any order.

    def times(self, matrix: np.ndarray, factor: np.ndarray, thin: np.ndarray) -> Work:
        """Return a function that writes `matrix` x `factor`, (rank, columns), to `thin`, (rank, rows)."""
        work = self._codec.times(matrix, factor, thin)
        return work or without_warnings(partial(np.einsum, "ij,kj->ki", matrix, factor, out=thin))

    def transposed_times(self, matrix: np.ndarray, factor: np.ndarray, thin: np.ndarray) -> Work:
        """Return a function that writes transposed `matrix` x `factor`, (rank, rows), to `thin`, (rank, columns)."""
        work = self._codec.transposed_times(matrix, factor, thin)
        return work or without_warnings(partial(np.einsum, "ij,ki->kj", matrix, factor, out=thin))

    def outer(self, first: np.ndarray, second: np.ndarray, matrix: np.ndarray) -> Work:
        """Return a function that writes `first`, (rank, rows), x transposed `second`, (rank, columns), to `matrix`."""
        work = self._codec.outer(first, second, matrix)
        return work or without_warnings(partial(_outer, first, second, matrix))


def chars_nbytes(count: int) -> int:
    """Return the bytes of `count` elements as int8: whole blocks, each with a float32 scale."""
    return -(-count // BLOCK) * (BLOCK + 4)


def largest_nbytes(chosen: int, dtype: np.dtype) -> int:
    """Return the bytes of `chosen` elements with their indices."""
    return chosen * (4 + dtype.itemsize)


# --- NumPy ---


def _to_halves(values: np.ndarray, halves: np.ndarray, divisor: int) -> None:
    halves[...] = values / values.dtype.type(divisor)


def _to_bfloat16(values: np.ndarray, halves: np.ndarray, divisor: int) -> None:
    halves[...] = to_bfloat16(values / values.dtype.type(divisor))


def _from_bfloat16(halves: np.ndarray, values: np.ndarray) -> None:
    values[...] = from_bfloat16(halves)


def _mean_of(decode: Callable[[np.ndarray], np.ndarray], rows: np.ndarray, out: np.ndarray) -> None:
    total = decode(rows[0]).astype(out.dtype)
    for row in rows[1:]:
        total += decode(row)
    total /= len(rows)
    np.copyto(out, total)  # other ranks may already read `out`, so only final values are written


def _to_chars(values: np.ndarray, residual: np.ndarray, row: np.ndarray) -> None:
    wanted = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    np.add(values, residual, out=wanted.reshape(-1)[: values.size], casting="same_kind")
    # NaN is kept in the scale, so that the mean shows it.
    scales = np.abs(wanted).max(axis=1, initial=0.0) / np.float32(_LARGEST_CHAR)
    quotients = np.rint(wanted / np.where(scales > 0, scales, 1)[:, None])
    numbers = np.clip(np.where(np.isfinite(scales)[:, None], quotients, 0), -_LARGEST_CHAR, _LARGEST_CHAR)
    row[: 4 * scales.size] = scales.view(np.uint8)
    row[4 * scales.size :] = numbers.astype(np.int8).view(np.uint8).reshape(-1)
    left = (values + residual) - unpack(row, values.size)
    residual[...] = np.where(np.isfinite(left), left, 0)


def unpack(packed: np.ndarray, count: int) -> np.ndarray:
    blocks = packed.size // (BLOCK + 4)
    scales = packed[: 4 * blocks].copy().view(np.float32)
    numbers = packed[4 * blocks :].view(np.int8).reshape(blocks, BLOCK)
    return (numbers * scales[:, None]).astype(np.float32).reshape(-1)[:count]


def _to_largest(values: np.ndarray, residual: np.ndarray, row: np.ndarray) -> None:
    wanted = values + residual
    chosen = row.size // (4 + wanted.itemsize)
    sizes = np.abs(wanted)
    sizes[np.isnan(sizes)] = np.inf  # always sent, so that every rank sees it
    limit = np.partition(sizes, sizes.size - chosen)[sizes.size - chosen]
    larger, equal = np.flatnonzero(sizes > limit), np.flatnonzero(sizes == limit)
    places = np.sort(np.concatenate([larger, equal[: chosen - larger.size]])).astype(np.uint32)
    row[: 4 * chosen] = places.view(np.uint8)
    row[4 * chosen :] = wanted[places].view(np.uint8)
    wanted[places] = 0
    residual[...] = np.where(np.isfinite(wanted), wanted, 0)


def _mean_of_largest(rows: np.ndarray, out: np.ndarray, total: np.ndarray) -> None:
    total[...] = 0
    chosen = rows.shape[1] // (4 + out.itemsize)
    for row in rows:
        total[row[: 4 * chosen].copy().view(np.uint32)] += row[4 * chosen :].copy().view(out.dtype)
    total /= len(rows)
    np.copyto(out, total)


def _outer(first: np.ndarray, second: np.ndarray, matrix: np.ndarray) -> None:
    np.multiply.outer(first[0], second[0], out=matrix)
    for one, other in zip(first[1:], second[1:], strict=True):
        matrix += np.multiply.outer(one, other)
