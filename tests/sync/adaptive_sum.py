"""Adasum of flat vectors, by its formula."""

from __future__ import annotations

import numpy as np


def adaptive_sum(vectors: list[np.ndarray]) -> np.ndarray:
    """Return equation 4 of Maleki et al. (2021) over a tree of flat vectors, each node rounded to their dtype.

    Vector 2^k + r is combined with vector r first, then neighbours, the results of neighbours, and so on.
    """
    if len(vectors) == 1:
        return vectors[0]
    paired = 1 << (len(vectors).bit_length() - 1)
    extra = len(vectors) - paired
    level = [_combined(*both) for both in zip(vectors, vectors[paired:], strict=False)] + vectors[extra:paired]
    while len(level) > 1:
        level = [_combined(*level[at : at + 2]) for at in range(0, len(level), 2)]
    return level[0]


def _combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    wide, other = a.astype(np.longdouble), b.astype(np.longdouble)
    dot, of_a, of_b = (wide * other).sum(), (wide * wide).sum(), (other * other).sum()
    found = (1 - dot / (2 * of_a) if of_a else 1) * wide + (1 - dot / (2 * of_b) if of_b else 1) * other
    return found.astype(a.dtype)
