"""Other libraries' names for a Communicator's methods: a script of LizarDist's or mpi4py's runs with few changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import host_array
from clcomm.comm.collectives.all_reduce import AllReduces
from clcomm.comm.collectives.exchanges import Exchanges
from clcomm.comm.collectives.messages import MessageCalls, MessageHandle
from clcomm.comm.collectives.runner import refused_on_all
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.stats.events import describe_shapes
from clcomm.comm.transport.mpi_communicators import ANY_RANK


class OtherNames(AllReduces, Exchanges, MessageCalls):
    """LizarDist's and mpi4py's names (a base class of the Communicator).

    A buffer of mpi4py's is an array, or a list of an array and what mpi4py takes with it: a count, the ranks' counts,
    their displacements, and MPI's type. These have to be the array's, and blocks lie one after another.
    """

    rank: int
    size: int
    stats: CommStats
    bucket_size: Any
    use_bucketing: bool

    # --- both ---

    def allreduce(self, data: object, op: Any = "sum") -> np.ndarray:
        """Return the reduction of `data` over the ranks as a new array; `op` may be mpi4py's constant."""
        array = np.asarray(data)
        return self.all_reduce(array, op, out=np.empty(array.shape, array.dtype))

    def bcast(self, data: object, root: int = 0) -> Any:
        """Return root's object on every rank; it is pickled, so prefer `broadcast` for arrays."""
        return self.broadcast_object(data, root)

    # --- mpi4py's ---

    def allgather(self, data: Any) -> list[Any]:
        """Return every rank's array or object, in rank order."""
        return self.all_gather_list(data)

    def Get_rank(self) -> int:
        """Return this process's rank."""
        return self.rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def Barrier(self) -> None:
        """See `barrier`."""
        self.barrier()

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """See `broadcast`."""
        self.broadcast(_array(buf, "buf"), root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = "sum") -> None:
        """See `all_reduce`."""
        self.all_reduce(_own(sendbuf, recvbuf), op, out=_array(recvbuf, "recvbuf"))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = "sum", root: int = 0) -> None:
        """See `reduce`."""
        self.reduce(_own(sendbuf, recvbuf), op, root, out=_array(recvbuf, "recvbuf") if self.rank == root else None)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = "sum") -> None:
        """See `reduce_scatter`."""
        own, out = _array(sendbuf, "sendbuf"), _array(recvbuf, "recvbuf")
        self.reduce_scatter(own.reshape(-1), op, out=out.reshape(-1))

    def Scan(self, sendbuf: Any, recvbuf: Any, op: Any = "sum") -> None:
        """See `scan`."""
        self.scan(_own(sendbuf, recvbuf), op, out=_array(recvbuf, "recvbuf"))

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: Any = "sum") -> None:
        """See `exscan`; on rank 0 `recvbuf` stays as it is."""
        self.exscan(_own(sendbuf, recvbuf), op, out=_array(recvbuf, "recvbuf"))

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """See `all_gather`."""
        self.all_gather(_array(sendbuf, "sendbuf"), out=_array(recvbuf, "recvbuf"))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """See `all_gather_list`."""
        self.all_gather_list(_array(sendbuf, "sendbuf"), out=_array(recvbuf, "recvbuf"))

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """See `gather`."""
        self.gather(_array(sendbuf, "sendbuf"), root, out=_array(recvbuf, "recvbuf") if self.rank == root else None)

    Gatherv = Gather

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """See `scatter`: of equal blocks, or of those whose counts `sendbuf` lists."""
        blocks = _blocks(sendbuf, "sendbuf", self.size) if self.rank == root else None
        self.scatter(blocks, root, out=_array(recvbuf, "recvbuf"))

    Scatterv = Scatter

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """See `all_to_all`: of equal blocks, or of those whose counts the buffers list."""
        self.all_to_all(_blocks(sendbuf, "sendbuf", self.size), _blocks(recvbuf, "recvbuf", self.size))

    Alltoallv = Alltoall

    def Send(self, buf: Any, dest: int | None, tag: int = 0) -> None:
        """See `send`."""
        self.send(_array(buf, "buf"), dest, tag)

    def Isend(self, buf: Any, dest: int | None, tag: int = 0) -> MessageHandle:
        """See `isend`."""
        return self.isend(_array(buf, "buf"), dest, tag)

    def Recv(self, buf: Any, source: int | str | None = ANY_RANK, tag: int = 0) -> None:
        """See `recv`; the tag is always the sender's."""
        self.recv(_array(buf, "buf"), source, tag)

    def Irecv(self, buf: Any, source: int | str | None = ANY_RANK, tag: int = 0) -> MessageHandle:
        """See `irecv`."""
        return self.irecv(_array(buf, "buf"), source, tag)

    def Sendrecv(
        self, sendbuf: Any, dest: int | None, sendtag: int = 0, recvbuf: Any = None,
        source: int | str | None = ANY_RANK, recvtag: int = 0,
    ) -> None:  # fmt: skip
        """See `sendrecv`."""
        self.sendrecv(_array(sendbuf, "sendbuf"), dest, sendtag, _array(recvbuf, "recvbuf"), source, recvtag)

    # --- LizarDist's ---

    def get_rank(self) -> int:
        """Return this process's rank."""
        return self.rank

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def bucketed_allreduce(self, tensors: Sequence[object], op: Any = "sum") -> list[np.ndarray]:
        """Return the reductions of a list of arrays as new arrays, in buckets of `bucket_size` bytes."""
        results: list[np.ndarray] = []
        for bucket in _buckets_of(list(map(np.asarray, tensors)), self.bucket_size if self.use_bucketing else 0):
            whole = np.concatenate([tensor.reshape(-1) for tensor in bucket])
            reduced = self.all_reduce(whole, op, compared=describe_shapes([tensor.shape for tensor in bucket]))
            parts = np.split(reduced, np.cumsum([tensor.size for tensor in bucket])[:-1])
            results += [part.reshape(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)]
        return results

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


for _name in ("Bcast", "Reduce", "Allreduce", "Reduce_scatter_block", "Scan", "Exscan", "Gather", "Gatherv", "Scatter",
              "Scatterv", "Allgather", "Allgatherv", "Alltoall", "Alltoallv"):  # fmt: skip
    setattr(OtherNames, _name, refused_on_all(getattr(OtherNames, _name)))  # what is wrong with a rank's buffer


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


# --- mpi4py's buffers ---


def _own(sendbuf: Any, recvbuf: Any) -> Any:
    """Return what a rank gives to a reduction: the receiving array for MPI.IN_PLACE."""
    in_place = type(sendbuf).__name__ == "InPlaceType"
    return _array(recvbuf, "recvbuf") if in_place else _array(sendbuf, "sendbuf")


def _array(buffer: Any, name: str) -> Any:
    """Return a buffer's array."""
    return _parts(buffer, name)[0]


def _blocks(buffer: Any, name: str, ranks: int) -> list[np.ndarray]:
    """Return a buffer's blocks, one for each rank, as views."""
    array, counts = _parts(buffer, name)
    array = host_array(array, name)
    if len(counts) != ranks and array.size % ranks:
        raise ArgumentError(f"{name}: expected elements that {ranks} ranks divide, got {array.size}; give their counts")
    starts = list(accumulate(counts if len(counts) == ranks else [array.size // ranks] * ranks))
    return np.split(array.reshape(-1), starts[:-1])


def _parts(buffer: Any, name: str) -> tuple[Any, list[int]]:
    """Return a buffer's array, and the counts that it lists, after a look at all of them."""
    if not isinstance(buffer, (list, tuple)) or not buffer:
        return buffer, []
    array = host_array(buffer[0], name)
    kinds = [each for each in buffer[1:] if hasattr(each, "tocode")]
    lists = [each for each in buffer[1:] if each is not None and not hasattr(each, "tocode")]
    if len(lists) == 1 and isinstance(lists[0], tuple) and not isinstance(lists[0][0], Integral):
        lists = list(lists[0])  # (counts, displacements)
    counts, starts = ([np.atleast_1d(each).tolist() for each in lists] + [[], []])[:2]
    if kinds and kinds[0].Get_size() > 1 and np.dtype(kinds[0].tocode()) != array.dtype:
        raise ArgumentError(f"{name}: expected MPI's type of {array.dtype}, got that of {np.dtype(kinds[0].tocode())}")
    if (counts and sum(counts) != array.size) or (starts and starts != [0, *accumulate(counts)][:-1]):
        raise ArgumentError(
            f"{name}: expected counts of {array.size:,} elements in blocks one after another, got counts {counts} and "
            f"displacements {starts}; send slices of the array"
        )
    return array, counts
