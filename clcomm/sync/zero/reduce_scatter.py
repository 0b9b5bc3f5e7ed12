"""The reduce-scatter that gives each rank its part of the mean gradients, in every stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.sync.bucket_plan import GRADIENTS


def prepared_mean(
    comm: Communicator, gradients: np.ndarray, mean: np.ndarray, nbytes: int, bucket: int = -1
) -> Callable[[], object]:
    """Return a function that averages the ranks' gradients and writes this rank's part to `mean`; collective.

    Args:
        comm: the ranks.
        gradients: float32: in memory common to all ranks, a row for each; elsewhere this rank's own, flat.
        mean: receives part `rank` of the mean; the ranks' parts are equally long.
        nbytes: the size to count.
        bucket: its index, for observers.
    """
    if gradients.ndim == 2:
        return comm.reduce_scatter_init(gradients, "mean", out=mean, label=GRADIENTS, nbytes=nbytes, bucket=bucket)
    return partial(comm.reduce_scatter, gradients, "mean", out=mean, label=GRADIENTS, nbytes=nbytes, bucket=bucket)
