"""Ranks with uneven inputs: the weight of each rank's gradient, and how many ranks still have batches."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.sync.agreement import CHECKS


class InputTotals(NamedTuple):
    """How many ranks still have inputs at this step, and how many samples they bring."""

    ranks: int
    samples: float


def total_inputs(comm: Communicator, samples: float | None) -> InputTotals:
    """Return this step's totals, the same on every rank; samples: this rank's, None: it has no more. Collective."""
    mine = np.array([0, 0] if samples is None else [1, samples], np.float64)
    ranks, total = comm.all_reduce(mine, label=CHECKS)
    return InputTotals(int(ranks), float(total))


def gradient_weight(comm: Communicator, samples: float, of: float | None = None, *, in_join: bool = False) -> float:
    """Return the factor for this rank's gradient that makes the mean over ranks the mean over samples.

    Collective, unless `of` is given outside of a join, where ranks without inputs have to be told of each step.

    1.0, and so the same bits as without, where all ranks have equally many. Raises ArgumentError unless `samples` is a
    number from 0 up.

    Args:
        samples: this rank's.
        of: the number of samples to divide by; None: that of all ranks.
    """
    if isinstance(samples, bool) or not isinstance(samples, (int, float, np.number)) or not 0 <= samples < math.inf:
        raise ArgumentError(f"samples: expected this rank's number of samples, from 0 up, got {samples!r}")
    total = of
    if of is None or in_join:
        found = total_inputs(comm, float(samples)).samples
        total = found if of is None else of
    return float(samples) * comm.size / total if total else 0.0


def apply_weight(gradients: np.ndarray, weight: float) -> None:
    """Multiply gradients by a weight, in place; 0 clears them, NaN and Inf included."""
    if weight == 0.0:
        gradients[...] = 0
    elif weight != 1.0:
        gradients *= gradients.dtype.type(weight)
