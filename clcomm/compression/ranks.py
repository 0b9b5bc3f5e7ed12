"""The ranks that a scheme reduces over: a Communicator, or the first ranks of all hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from clcomm.host_memory import aligned_zeros
from clcomm.transport import Transport


class Ranks(Protocol):
    """What a scheme needs of a Communicator; arrays are of one dimension, but for rows."""

    rank: int
    size: int
    hosts: int

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return zeroed bytes of this rank for what travels."""

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return zeroed bytes for what all ranks are to have; they may be one memory for ranks of a host."""

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        """Reduce an array over the ranks, "sum" or "mean", in place, and return it."""

    def all_reduce_init(self, array: np.ndarray, *, out: np.ndarray) -> Callable[[], None]:
        """Return what writes the ranks' sum to `out`, prepared once."""

    def all_gather_in_place_init(self, array: np.ndarray) -> Callable[[], None]:
        """Return what gives every rank all rows, (size, length), of which each has written its own, prepared once."""


class FirstRanks:
    """The first ranks of all hosts, and how many bytes this one has handed over to be sent."""

    hosts = 2  # or more: no memory is common to them

    def __init__(self, transport: Transport):
        self._transport = transport
        self.rank, self.size = transport.rank, transport.world_size
        self.handed_over = 0

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return zeroed bytes of this rank."""
        return aligned_zeros(nbytes)

    allocate_common = allocate

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        """Reduce an array over the hosts, "sum" or "mean", in place, and return it."""
        self.handed_over += array.nbytes
        self._transport.all_reduce(array, array, "sum")
        if op == "mean":  # the transport's own is over all ranks of the job
            array /= array.dtype.type(self.size)
        return array

    def all_reduce_init(self, array: np.ndarray, *, out: np.ndarray) -> Callable[[], None]:
        """Return what writes the hosts' sum to `out`."""
        reduce = self._transport.prepare_all_reduce(array, out, "sum")

        def run() -> None:
            self.handed_over += array.nbytes
            reduce()

        return run

    def all_gather_in_place_init(self, array: np.ndarray) -> Callable[[], None]:
        """Return what gives every host all rows."""
        own = array[self.rank].copy()

        def run() -> None:
            self.handed_over += own.nbytes
            own[...] = array[self.rank]  # MPI wants source and target apart
            self._transport.all_gather(own, array.reshape(-1))

        return run
