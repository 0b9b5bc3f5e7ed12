"""What a collective has to give: values by rank, and the fold in rank order that every transport promises."""

from __future__ import annotations

import numpy as np

FOLDS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}


def drawn(rank: int, size: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Return the values that `rank` contributes: any rank can compute those of all."""
    rng = np.random.default_rng([seed, rank, size])
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, size).astype(dtype)
    if kind in "iu":
        return rng.integers(0, 20, size).astype(dtype)
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)
    return (values + 1j * rng.standard_normal(size)).astype(dtype) if kind == "c" else values.astype(dtype)


def folded(rows: list[np.ndarray], op: str) -> np.ndarray:
    """Return ((row0 op row1) op row2) ..., divided by their number for a mean, in the rows' own dtype."""
    result = rows[0].copy()
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            result = FOLDS[op](result, row)
        return result / result.dtype.type(len(rows)) if op == "mean" else result


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
