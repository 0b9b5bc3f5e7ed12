"""The calls of LizarDist's Communicator, so that its scripts run with only their imports changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from clcomm.errors import ArgumentError
from clcomm.stats.call import describe_shapes
from clcomm.stats.comm_stats import CommStats
from clcomm.transport.mpi_communicators import reduction_name


class LizarDistCalls(ABC):
    """LizarDist's names for the Communicator's methods (a base class of it)."""

    rank: int
    size: int
    bucket_size: int
    use_bucketing: bool
    stats: CommStats
    #: Calls and bytes up to the last `_reset_bucket_stats()`, and the tallies that held them, until `stats` is reset.
    _counted_before: tuple[object, int, int] = None, 0, 0

    @abstractmethod
    def all_reduce(
        self, array: np.ndarray, op: str = "sum", *, out: np.ndarray | None = None, compared: str | None = None
    ) -> np.ndarray:
        """Reduce an array over the ranks."""

    @abstractmethod
    def broadcast_object(self, obj: object, root: int = 0) -> Any:
        """Return root's object on every rank."""

    def get_rank(self) -> int:
        """Return this process's rank."""
        return self.rank

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def allreduce(self, data: np.ndarray, op: object = "sum") -> np.ndarray:
        """Return the reduction of `data` over the ranks as a new array; `op` may be mpi4py's constant."""
        data = np.asarray(data)
        return self.all_reduce(data, reduction_name(op), out=np.empty(data.shape, data.dtype))

    def bcast(self, data: object, root: int = 0) -> Any:
        """Return root's object on every rank; it is pickled, so prefer `broadcast` for arrays."""
        return self.broadcast_object(data, root)

    def bucketed_allreduce(self, tensors: Sequence[np.ndarray], op: Any = "sum") -> list[np.ndarray]:
        """Return the reductions of a list of arrays as new arrays, in buckets of `bucket_size` bytes."""
        op = reduction_name(op)
        tensors = [np.asarray(tensor) for tensor in tensors]
        results: list[np.ndarray] = []
        for bucket in _buckets_of(tensors, self.bucket_size if self.use_bucketing else 0):
            whole = np.concatenate([tensor.reshape(-1) for tensor in bucket])
            reduced = self.all_reduce(whole, op, compared=describe_shapes([tensor.shape for tensor in bucket]))
            cuts = np.cumsum([tensor.size for tensor in bucket])[:-1]
            parts = np.split(reduced, cuts)
            results += [part.reshape(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)]
        return results

    def get_bucket_stats(self) -> dict[str, float]:
        """Return the number of all-reduces, their bytes, and the mean bytes per call."""
        calls, nbytes = self._count()
        return {
            "total_allreduce_calls": calls,
            "total_bytes_sent": nbytes,
            "average_bytes_per_call": nbytes / max(1, calls),
        }

    @property
    def total_allreduce_calls(self) -> int:
        """Number of all-reduces."""
        return self._count()[0]

    @property
    def total_bytes_sent(self) -> int:
        """Bytes of all all-reduces together."""
        return self._count()[1]

    @property
    def average_bytes_per_call(self) -> float:
        """Mean bytes of an all-reduce; 0 without any."""
        return self.get_bucket_stats()["average_bytes_per_call"]

    def _reset_bucket_stats(self) -> None:
        """Set these three counts to 0; `stats` is not reset."""
        total = self.stats.total("all_reduce")
        self._counted_before = self.stats.tallies, int(total["calls"]), int(total["bytes"])

    def _count(self) -> tuple[int, int]:
        total, (tallies, calls, nbytes) = self.stats.total("all_reduce"), self._counted_before
        if tallies is not self.stats.tallies:
            calls = nbytes = 0
        return int(total["calls"]) - calls, int(total["bytes"]) - nbytes


def by_position(comm: object, bucket_size: int | str, default: str) -> tuple[Any, int | str]:
    """Return (comm, bucket_size) of the Communicator's arguments: a number as `comm` is LizarDist's bucket size."""
    if not isinstance(comm, Integral) or isinstance(comm, bool):
        return comm, bucket_size
    if bucket_size != default:
        raise ArgumentError(f"bucket_size: expected once, got {comm} by position and {bucket_size!r} by name")
    return None, int(comm)


def _buckets_of(tensors: Sequence[np.ndarray], bucket_size: int) -> Iterable[list[np.ndarray]]:
    bucket: list[np.ndarray] = []
    filled = 0
    for tensor in tensors:
        if bucket and (filled + tensor.nbytes > bucket_size or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.nbytes
    if bucket:
        yield bucket
