"""A rank whose all-reduces the parent times, in the same loop for every system."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

#: Runs one all-reduce, or another measured call, and returns when this rank can read the result.
Once = Callable[[], object]
_ALIGNING_CALLS = 3


class Measured(NamedTuple):
    """A system at one size: its call, this rank's operand, and its result."""

    once: Once
    operand: np.ndarray
    result: np.ndarray
    #: What the result is, as a multiple of the ranks' values where all are equal.
    factor: float


def rank_values(count: int, rank: int) -> np.ndarray:
    """Return a rank's float32 values for the check: small whole numbers, whose sums are exact in any order."""
    return (np.arange(count) % 1000 + rank).astype(np.float32)


def expected_sum(count: int, ranks: int) -> np.ndarray:
    """Return the sum of all ranks' `rank_values`."""
    return (np.arange(count) % 1000 * ranks + ranks * (ranks - 1) // 2).astype(np.float32)


def timed(system: Measured, repeats: int) -> dict[str, Any]:
    """Return the begin and the end of `repeats` calls, by the host's monotonic clock, and the seconds of `altering`.

    Before each call every rank writes its whole operand, as backward does, so that no cache holds what another rank
    read in the call before. `altering` is what those writes take alone. Raises AssertionError for a wrong result.
    """
    once, alter = system.once, system.operand.fill
    for number in range(_ALIGNING_CALLS + repeats // 2):  # until the scheduler has placed the woken ranks
        alter(number & 3)
        once()
    start = time.monotonic()
    for number in range(repeats):
        alter(number & 3)
    altering = time.monotonic() - start
    once()
    start = time.monotonic()
    for number in range(repeats):
        alter(number & 3)
        once()
    stop = time.monotonic()
    assert (system.result == system.factor * (repeats - 1 & 3)).all(), "a wrong sum"
    return {"start": start, "stop": stop, "altering": altering}
