"""The ranks that a scheme reduces over: a Communicator, or the first ranks of all hosts."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.host.arrays import aligned_zeros
from clcomm.comm.transport.base import Transport
from clcomm.sync.compression.coding import Codec, Work


class Ranks(Protocol):
    """The collectives of a Communicator that schemes need; arrays are one-dimensional, except for rows."""

    rank: int
    size: int
    hosts: int

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return zeroed bytes of this rank for data to send."""

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return zeroed bytes for a common result; the ranks of a host may share them."""

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        """Reduce an array over the ranks, "sum" or "mean", in place, and return it."""

    def all_reduce_init(self, array: np.ndarray, *, out: np.ndarray) -> Callable[[], None]:
        """Return a function that writes the ranks' sum to `out`, prepared once."""

    def all_gather_in_place_init(self, array: np.ndarray) -> Callable[[], None]:
        """Return a function that gathers rows, (size, length), each written by its rank; prepared once."""


class FirstRanks:
    """The first ranks of all hosts, with a count of the bytes sent by this one."""

    hosts = 2  # or more: they share no memory

    def __init__(self, transport: Transport):
        self._transport = transport
        self.rank, self.size = transport.rank, transport.world_size
        self.handed_over = 0

    def allocate(self, nbytes: int) -> np.ndarray:
        return aligned_zeros(nbytes)

    allocate_common = allocate

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        self.handed_over += array.nbytes
        self._transport.all_reduce(array, array, "sum")
        if op == "mean":  # the transport's own divides by all ranks of the job
            array /= array.dtype.type(self.size)
        return array

    def all_reduce_init(self, array: np.ndarray, *, out: np.ndarray) -> Callable[[], None]:
        return self._counted(array.nbytes, self._transport.prepare_all_reduce(array, out, "sum"))

    def all_gather_in_place_init(self, array: np.ndarray) -> Callable[[], None]:
        row, whole = array[self.rank], array.reshape(-1)
        source = row.copy()  # MPI requires separate source and target

        def gather() -> None:
            source[...] = row
            self._transport.all_gather(source, whole)

        return self._counted(row.nbytes, gather)

    def _counted(self, nbytes: int, move: Callable[[], object]) -> Callable[[], None]:
        """Return a prepared collective, each call of which sends `nbytes`."""

        def run() -> None:
            self.handed_over += nbytes
            move()

        return run


# --- A hook's task, and the base of hooks that prepare it once. ---


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


# --- Exchange of encoded rows: each rank encodes its own and decodes all. ---


def prepare_exchange(
    comm: Ranks,
    columns: int,
    dtype: type,
    encode: Callable[[np.ndarray, int], Work],
    decode: Callable[[np.ndarray], Work],
) -> Work:
    """Return a function that encodes this rank's row, gathers all rows and decodes them; both are collective.

    Two sets of rows take turns: a fast rank writes to one while others still read the other, and returns to the first
    only after a call in which all ranks have met.

    Args:
        columns: elements of a row.
        encode: called with (rows, rank); prepares the encoding of this rank's row.
        decode: called with (rows); prepares the decoding of rows of (world_size, columns).
    """
    sides, nbytes = [], comm.size * columns * np.dtype(dtype).itemsize
    for _ in range(2):
        rows: np.ndarray = comm.allocate_common(nbytes).view(dtype).reshape(comm.size, columns)
        sides.append((encode(rows, comm.rank), comm.all_gather_in_place_init(rows), decode(rows)))
    turns = itertools.cycle(sides)

    def exchange() -> None:
        for part in next(turns):
            part()

    return exchange
