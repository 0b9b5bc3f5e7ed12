"""Ranks with uneven inputs: whose gradient counts how much, and who still has batches."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from clcomm.agreement import CHECKS
from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError


class Turnout(NamedTuple):
    """How many ranks bring samples to this step, or might have, and how many samples that is in all."""

    ranks: int
    samples: float


def turnout(comm: Communicator, samples: float | None) -> Turnout:
    """Return this step's turnout, the same on every rank; samples: this rank's, None where it is done. Collective."""
    mine = np.array([0, 0] if samples is None else [1, samples], np.float64)
    ranks, total = comm.all_reduce(mine, label=CHECKS)
    return Turnout(int(ranks), float(total))


def weight_of(comm: Communicator, samples: float) -> float:
    """Return what this rank's gradient is multiplied with, so that the mean over the ranks is that over the samples.

    1.0, and so the same bits as without, where all ranks have equally many. Raises ArgumentError for a number of
    samples that is none. Collective.
    """
    if isinstance(samples, bool) or not isinstance(samples, (int, float, np.number)) or not 0 <= samples < math.inf:
        raise ArgumentError(f"samples: expected this rank's number of samples, from 0 up, got {samples!r}")
    total = turnout(comm, float(samples)).samples
    return float(samples) * comm.size / total if total else 0.0


def weigh(gradients: np.ndarray, weight: float) -> None:
    """Multiply gradients with a weight, in place; 0 leaves nothing of NaN and Inf either."""
    if weight == 0.0:
        gradients[...] = 0
    elif weight != 1.0:
        gradients *= gradients.dtype.type(weight)
