"""LizarDist's names for a Communicator's methods and counts: its scripts run with only their imports changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from clcomm.collectives.new_arrays import Reduces, all_reduced, all_reduced_in_buckets
from clcomm.stats.comm_stats import CommStats


class Broadcasts(Protocol):
    """A Communicator, as `bcast` uses it."""

    def broadcast_object(self, obj: object, root: int = 0) -> Any:
        """Return root's object on every rank."""


class LizarDistCalls:
    """LizarDist's names (a base class of the Communicator)."""

    rank: int
    size: int
    stats: CommStats

    def get_rank(self) -> int:
        """Return this process's rank."""
        return self.rank

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def allreduce(self: Reduces, data: np.ndarray, op: object = "sum") -> np.ndarray:
        """Return the reduction of `data` over the ranks as a new array; `op` may be mpi4py's constant."""
        return all_reduced(self, data, op)

    def bcast(self: Broadcasts, data: object, root: int = 0) -> Any:
        """Return root's object on every rank; it is pickled, so prefer `broadcast` for arrays."""
        return self.broadcast_object(data, root)

    def bucketed_allreduce(self: Reduces, tensors: Sequence[np.ndarray], op: object = "sum") -> list[np.ndarray]:
        """Return the reductions of a list of arrays as new arrays, in buckets of `bucket_size` bytes."""
        return all_reduced_in_buckets(self, tensors, op)

    def get_bucket_stats(self) -> dict[str, float]:
        """Return the number of all-reduces, their bytes, and the mean bytes per call."""
        return self.stats.all_reduces()

    @property
    def total_allreduce_calls(self) -> int:
        """Number of all-reduces."""
        return int(self.get_bucket_stats()["total_allreduce_calls"])

    @property
    def total_buckets(self) -> int:
        """Number of buckets that were all-reduced; an array that is reduced by itself is one."""
        return self.total_allreduce_calls

    @property
    def total_bytes_sent(self) -> int:
        """Bytes of all all-reduces together."""
        return int(self.get_bucket_stats()["total_bytes_sent"])

    @property
    def average_bytes_per_call(self) -> float:
        """Mean bytes of an all-reduce; 0 without any."""
        return self.get_bucket_stats()["average_bytes_per_call"]

    def _reset_bucket_stats(self) -> None:
        """Set these three counts to 0; `stats` is not reset."""
        self.stats.restart_all_reduces()
