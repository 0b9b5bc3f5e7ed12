"""A hook's task, and the base of hooks that prepare it once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from clcomm.base.flat_space.buckets import Bucket
from clcomm.sync.compression.coding import Codec, Work
from clcomm.sync.compression.ranks import Ranks


@dataclass(frozen=True)
class Task:
    """The reduction of one bucket's gradient by a hook."""

    #: This rank's gradient.
    gradient: np.ndarray
    ranks: Ranks
    #: Receives the mean over the ranks.
    out: np.ndarray
    bucket: Bucket
    #: All of the model's gradients, as bytes; None: not known.
    flat: np.ndarray | None = None
    #: Encodes on the model's device; None: NumPy does.
    codec: Codec | None = None


class PreparedHook(ABC):
    """A hook that prepares its calls once for each bucket of a plan, on fixed memory."""

    @abstractmethod
    def prepare(self, task: Task) -> Work:
        """Return the function that reduces; preparing is collective, and so is each call of the function."""

    def __call__(self, gradient: np.ndarray, comm: Ranks, out: np.ndarray, bucket: Bucket) -> None:
        self.prepare(Task(gradient, comm, out, bucket))()
