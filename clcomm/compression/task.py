"""What a hook is to reduce, and the base of hooks that prepare that once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from clcomm.buckets import Bucket
from clcomm.compression.coding import Codec, Work
from clcomm.compression.ranks import Ranks


@dataclass(frozen=True)
class Task:
    """A bucket's gradient on this rank, the ranks, where the mean is to appear, and the bucket: what a hook is given.

    flat: all of the model's gradients, as bytes, None: not known. codec: the model's device where that can code.
    """

    gradient: np.ndarray
    ranks: Ranks
    out: np.ndarray
    bucket: Bucket
    flat: np.ndarray | None = None
    codec: Codec | None = None


class PreparedHook(ABC):
    """A hook that prepares its calls, once for each bucket of a plan, on memory that stays."""

    @abstractmethod
    def prepare(self, task: Task) -> Work:
        """Return what a call does; collective, and so is each call of that."""

    def __call__(self, gradient: np.ndarray, comm: Ranks, out: np.ndarray, bucket: Bucket) -> None:
        self.prepare(Task(gradient, comm, out, bucket))()
