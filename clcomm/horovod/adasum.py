"""Adasum: a sum of vectors that takes of parallel ones the mean and of orthogonal ones the sum.

S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, equation 4: two vectors a and b
become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b. More are combined in pairs of neighbours, then the results in pairs,
and so on, as the paper's recursive halving does for a power of two; of an odd number the last one waits for the next
round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def adasum(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Return the adaptive sum of vectors in float64.

    vectors: one of each rank, in rank order, of equal length and a real dtype.
    """
    level = [vector.astype(np.float64) for vector in vectors]
    with np.errstate(all="ignore"):  # the caller looks for NaN and Inf, as after any sum
        while len(level) > 1:
            pairs = [_pair(*level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
            level = [*pairs, *level[2 * len(pairs) :]]
    return level[0]


def _pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, of_a, of_b = float(a @ b), float(a @ a), float(b @ b)
    return a * _weight(dot, of_a) + b * _weight(dot, of_b)


def _weight(dot: float, square: float) -> float:
    return 1.0 if square == 0.0 else 1.0 - dot / (2.0 * square)
