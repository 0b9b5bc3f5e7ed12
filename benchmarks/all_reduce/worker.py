"""A rank whose all-reduces the parent times, in the same loop for every system."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

#: Runs one all-reduce, or another measured call, and returns when this rank can read the result.
Once = Callable[[], object]
_ALIGNING_CALLS = 3


def rank_values(count: int, rank: int) -> np.ndarray:
    """Return a rank's float32 values for the check: small whole numbers, whose sums are exact in any order."""
    return (np.arange(count) % 1000 + rank).astype(np.float32)


def expected_sum(count: int, ranks: int) -> np.ndarray:
    """Return the sum of all ranks' `rank_values`."""
    return (np.arange(count) % 1000 * ranks + ranks * (ranks - 1) // 2).astype(np.float32)


def timed(once: Once, repeats: int) -> dict[str, Any]:
    """Return the begin and the end of `repeats` calls in a row, by the host's monotonic clock."""
    for _ in range(_ALIGNING_CALLS + repeats // 2):  # until the scheduler has placed the woken ranks
        once()
    start = time.monotonic()
    for _ in range(repeats):
        once()
    return {"start": start, "stop": time.monotonic()}
