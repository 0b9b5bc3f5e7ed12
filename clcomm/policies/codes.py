"""Few bits for each number: codes of outer gradients, in rows of equal scale, and bits packed into bytes."""

from __future__ import annotations

import numpy as np

#: Numbers that share a scale, the largest magnitude among them.
ROW = 4096


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned codes of so many bits, at most 16, as bytes, each row beginning at one; codes: (rows, count)."""
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint16)
    flags = (codes.astype(np.uint16)[:, :, None] >> shifts) & 1
    return np.packbits(flags.astype(np.uint8).reshape(len(codes), -1), axis=1)


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return the (rows, count) codes of `pack`, uint16."""
    flags = np.unpackbits(packed, axis=1, count=count * bits).reshape(len(packed), count, bits)
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint16)
    joined: np.ndarray = np.bitwise_or.reduce(flags.astype(np.uint16) << shifts, axis=2)
    return joined


def rows_of(values: np.ndarray, row: int = ROW) -> np.ndarray:
    """Return a copy of numbers as float32, (rows, row), the last row padded with zeros."""
    rows = np.zeros((-(-values.size // row), row), np.float32)
    rows.reshape(-1)[: values.size] = values
    return rows


def to_powers(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales, (rows, 1), and codes of 4 bits: a sign and one of 8 sizes, 0 and the scale by 1, 1/2, ... 1/64.

    The form of Streaming DiLoCo's outer gradients, three bits of exponent and none of mantissa, with a 0.
    """
    scales = np.abs(rows).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.rint(-np.log2(np.abs(rows) / scales))
    exponents = np.where(np.isfinite(exponents) & (exponents <= 6), exponents, 7)
    return scales, (exponents.astype(np.uint16) | (rows < 0).astype(np.uint16) << 3)


def from_powers(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the numbers of `to_powers`."""
    sizes = np.append(0.5 ** np.arange(7, dtype=np.float32), np.float32(0))
    decoded: np.ndarray = np.concatenate([sizes, -sizes])[codes] * scales
    return decoded


def to_levels(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales, (rows, 1), and codes of 2^bits evenly spaced levels from -scale to scale."""
    scales = np.abs(rows).max(axis=1, keepdims=True)
    steps = np.float32((1 << bits) - 1)
    shares = np.divide(rows, scales, out=np.zeros_like(rows), where=scales > 0)
    return scales, np.rint((shares + 1) * (steps / 2)).astype(np.uint16)


def from_levels(scales: np.ndarray, codes: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of `to_levels`."""
    steps = np.float32((1 << bits) - 1)
    decoded: np.ndarray = (codes.astype(np.float32) * (2 / steps) - 1) * scales
    return decoded
