"""A hook that reduces each bucket by one of `clcomm.base.schedules`' algorithms: to study them, not for speed."""

from __future__ import annotations

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.schedules import ALGORITHMS
from clcomm.comm.communicator import Communicator


class AlgorithmHook:
    """Averages a bucket with messages from rank to rank. The bits depend on where buckets end, as the order does."""

    elementwise = False

    def __init__(self, algorithm: str):
        if algorithm not in ALGORITHMS:
            raise ArgumentError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        self.algorithm = algorithm

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None:
        comm.all_reduce(gradient, "mean", out=out, nbytes=bucket.nbytes, algorithm=self.algorithm)

    def __str__(self) -> str:
        return f"none, by {self.algorithm}"
