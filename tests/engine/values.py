"""Values that the tests of operations draw, and how results are compared."""

from __future__ import annotations

import numpy as np


def drawn(seed: int, *shape: int) -> np.ndarray:
    """Return normally distributed float32 values, the same for a seed and a shape."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * (1 + np.abs(expected).max()))
