"""Few bits for each number: codes of outer gradients, in rows of equal scale, and bits packed into bytes."""

from __future__ import annotations

import numpy as np

#: Numbers that share scales, and the bits of a place among them.
ROW, _PLACE_BITS = 4096, 12
#: In which sizes and the numbers that they stand for are fitted to each other.
_ROUNDS = 4


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


def place_bytes(count: int) -> int:
    """Return the length of `pack_places` for so many places of a row."""
    return 0 if count == ROW else min(-(-count * _PLACE_BITS // 8), ROW // 8)


def pack_places(places: np.ndarray) -> np.ndarray:
    """Return as bytes which numbers of each row are chosen; `places`, (rows, count), are theirs, in ascending order.

    A place takes 12 bits. Where that is less, there is one bit for each number of the row; where all are chosen, none.
    """
    count = places.shape[1]
    if place_bytes(count) < ROW // 8:
        return pack(places, _PLACE_BITS)[:, : place_bytes(count)]
    flags = np.zeros((len(places), ROW), np.uint8)
    np.put_along_axis(flags, places, 1, axis=1)
    return np.packbits(flags, axis=1)


def unpack_places(packed: np.ndarray, count: int) -> np.ndarray:
    """Return the places of `pack_places`, (rows, count)."""
    if count == ROW:
        return np.tile(np.arange(ROW), (len(packed), 1))
    if place_bytes(count) < ROW // 8:
        return unpack(packed, _PLACE_BITS, count).astype(np.intp)
    return np.nonzero(np.unpackbits(packed, axis=1))[1].reshape(len(packed), count)


def rows_of(values: np.ndarray, row: int = ROW) -> np.ndarray:
    """Return a copy of numbers as float32, (rows, row), the last row padded with zeros."""
    rows = np.zeros((-(-values.size // row), row), np.float32)
    rows.reshape(-1)[: values.size] = values
    return rows


def largest(rows: np.ndarray, count: int) -> np.ndarray:
    """Return the ascending places, (rows, count), of each row's largest numbers by size, of equal ones the first.

    As a stable sort chooses them, in a fraction of its time.
    """
    order = np.fmin(-np.abs(rows), 0)  # the largest first; of what is no number the size is taken as 0
    last = np.partition(order, count - 1, axis=1)[:, count - 1 : count]
    chosen, equal = order < last, order == last
    chosen |= equal & (np.cumsum(equal, axis=1, dtype=np.uint16) <= count - chosen.sum(axis=1, keepdims=True))
    return np.nonzero(chosen)[1].reshape(len(rows), count)


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
    """Return sizes, (rows, 2^(bits - 1)) in ascending order, and codes of a sign and the nearest size.

    A size is the mean of those that it stands for, which leaves the least squared error (Lloyd, "Least squares
    quantization in PCM", 1982): a few large numbers do not coarsen all others.
    """
    sizes, count = np.abs(rows), 1 << (bits - 1)
    groups = np.array_split(np.sort(sizes, axis=1), count, axis=1)
    levels = np.stack([group.mean(axis=1) if group.size else np.zeros(len(rows)) for group in groups], axis=1)
    levels = levels.astype(np.float32)
    for _ in range(_ROUNDS):
        chosen = _nearest(sizes, levels)
        for level in range(count):
            stands = chosen == level
            totals = np.sum(sizes, axis=1, where=stands, dtype=np.float32)
            np.divide(totals, stands.sum(axis=1), out=levels[:, level], where=stands.any(axis=1), casting="same_kind")
    return levels, _nearest(sizes, levels) | (rows < 0).astype(np.uint16) << (bits - 1)


def _nearest(sizes: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the number of the nearest of a row's ascending levels, uint16."""
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    chosen = np.zeros(sizes.shape, np.uint16)
    for middle in middles.T:
        chosen += sizes > middle[:, None]
    return chosen


def from_levels(levels: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the numbers of `to_levels`."""
    decoded: np.ndarray = np.take_along_axis(np.concatenate([levels, -levels], axis=1), codes.astype(np.intp), axis=1)
    return decoded
