"""bfloat16: the upper half of a float32, with its range and 8 bits of precision; NumPy has no dtype for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

#: The dtype of arrays of bfloat16; its one field holds the bits.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def dtype_name(dtype: np.dtype) -> str:
    """Return a dtype's name for messages."""
    return "bfloat16" if dtype == BFLOAT16 else str(dtype)


def itemsize_of(name: str) -> int:
    """Return the bytes of an element of the dtype with this name, one of `dtype_name`."""
    return (BFLOAT16 if name == "bfloat16" else np.dtype(name)).itemsize


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return float32 values as bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    with np.errstate(all="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16).view(BFLOAT16)


def from_bfloat16(halves: np.ndarray) -> np.ndarray:
    """Return bfloat16 values as float32."""
    return (halves.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def widened(
    rows: Sequence[np.ndarray],
    out: np.ndarray,
    prepare: Callable[[Sequence[np.ndarray], np.ndarray], Callable[[], None]],
) -> Callable[[], None]:
    """Return a function that reduces rows of bfloat16 as float32 and writes the rounded result to `out`.

    Args:
        rows: the operands, BFLOAT16.
        out: receives the result, BFLOAT16.
        prepare: returns a function that reduces rows of float32 to an array, which may be the first row.
    """
    wide = [np.empty(row.size, np.float32) for row in rows]
    reduce = prepare(wide, wide[0])

    def run() -> None:
        for values, row in zip(wide, rows, strict=True):
            values[:] = from_bfloat16(row)
        reduce()
        out[:] = to_bfloat16(wide[0])

    return run
