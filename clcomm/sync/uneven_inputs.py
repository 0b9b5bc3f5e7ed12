"""Ranks with uneven inputs: the weight of each rank's gradient, and how many ranks still have batches."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.missing import MISSING
from clcomm.comm.communicator import Communicator
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


def check_samples(samples: float, of: float | None = None) -> None:
    """Raise ArgumentError unless both are numbers from 0 up, and `of` is above 0 where there are samples."""
    for name, value, what in ("samples", samples, "this rank's number"), ("of", of or 0, "all ranks' number"):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value < math.inf:
            raise ArgumentError(f"{name}: expected {what} of samples, from 0 up, got {value!r}")
    if of == 0 and samples:
        raise ArgumentError(f"of: expected a number above 0 to divide by, as there are {samples} samples, got {of!r}")


def require_equal_samples(comm: Communicator, samples: float) -> None:
    """Raise ArgumentError on every rank where backward has mixed gradients that should have had weights. Collective."""
    check_samples(samples)
    everyone = comm.all_gather(np.array([float(samples)]), label=CHECKS)[:, 0]
    if (everyone != everyone[0]).any():
        raise ArgumentError(
            f"samples: expected them before backward, by expect_samples(), as SyncBatchNorm's backward adds up the "
            f"ranks' gradients, got {_listed(everyone)} after it"
        )


def mixing_weight(comm: Communicator, samples: float, of: float | None) -> float:
    """Return the factor for this rank's gradient as `gradient_weight`, for layers that divide by it. Collective."""
    check_samples(samples, of)
    everyone = comm.all_gather(np.array([float(samples)]), label=CHECKS)[:, 0]
    if not everyone.all():
        raise ArgumentError(
            "samples: expected some on every rank with SyncBatchNorm, whose statistics are of all ranks' batches, got "
            f"{_listed(everyone)}"
        )
    return weight_of(samples, comm.size, float(everyone.sum()) if of is None else of)


def _listed(samples: np.ndarray) -> str:
    return f"{', '.join(f'{each:g}' for each in samples)} on ranks 0 to {len(samples) - 1}"


def gradient_weight(comm: Communicator, samples: float, of: float | None = None, *, in_join: bool = False) -> float:
    """Return the factor for this rank's gradient that makes the mean over ranks the mean over samples.

    Collective, unless `of` is given outside of a join, where ranks without inputs have to be told of each step.

    1.0, and so the same bits as without, where all ranks have equally many. Raises ArgumentError unless `samples` is a
    number from 0 up.

    Args:
        samples: this rank's.
        of: the number of samples to divide by; None: that of all ranks.
    """
    check_samples(samples, of)
    found = total_inputs(comm, float(samples)).samples if of is None or in_join else 0.0
    return weight_of(samples, comm.size, found if of is None else of)


def weight_of(samples: float, count: int, total: float) -> float:
    """Return the factor of a gradient over `samples` that makes the mean of `count` gradients that over all samples."""
    return float(samples) * count / total if total else 0.0


def apply_weight(gradients: np.ndarray, weight: float) -> None:
    """Multiply gradients by a weight, in place; with 0 they are missing, NaN and Inf included."""
    if weight == 0.0:
        gradients[...] = MISSING
    elif weight != 1.0:
        gradients *= gradients.dtype.type(weight)
