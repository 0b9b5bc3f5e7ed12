"""All-reduces to new arrays: of anything that NumPy makes an array of, one by one or as a list in buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from clcomm.stats.call import describe_shapes
from clcomm.transport.mpi_communicators import reduction_name


class Reduces(Protocol):
    """A Communicator, as these functions use it."""

    @property
    def bucket_size(self) -> int:
        """The bytes of a bucket."""

    @property
    def use_bucketing(self) -> bool:
        """Whether arrays of a list are reduced in buckets."""

    def all_reduce(
        self, array: np.ndarray, op: str = "sum", *, out: np.ndarray | None = None, compared: str | None = None
    ) -> np.ndarray:
        """Reduce an array over the ranks."""


def all_reduced(comm: Reduces, data: object, op: object) -> np.ndarray:
    """Return the reduction of `data` over the ranks as a new array; `op` may be mpi4py's constant."""
    array = np.asarray(data)
    return comm.all_reduce(array, reduction_name(op), out=np.empty(array.shape, array.dtype))


def all_reduced_in_buckets(comm: Reduces, tensors: Sequence[object], op: object) -> list[np.ndarray]:
    """Return the reductions of a list of arrays as new arrays, in buckets of one dtype and at most `bucket_size`."""
    name, results = reduction_name(op), []
    for bucket in _buckets_of(list(map(np.asarray, tensors)), comm.bucket_size if comm.use_bucketing else 0):
        whole = np.concatenate([tensor.reshape(-1) for tensor in bucket])
        reduced = comm.all_reduce(whole, name, compared=describe_shapes([tensor.shape for tensor in bucket]))
        cuts = np.cumsum([tensor.size for tensor in bucket])[:-1]
        parts = np.split(reduced, cuts)
        results += [part.reshape(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)]
    return results


def _buckets_of(tensors: Sequence[np.ndarray], bucket_size: int) -> Iterator[list[np.ndarray]]:
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
