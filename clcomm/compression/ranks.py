"""The ranks that a scheme reduces over: a Communicator, or the first ranks of all hosts."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from clcomm.transport import Transport


class Ranks(Protocol):
    """What a scheme needs of a Communicator; arrays are of one dimension."""

    rank: int
    size: int

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        """Reduce an array over the ranks, "sum" or "mean", in place, and return it."""

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Return all ranks' arrays, (size, length)."""


class FirstRanks:
    """The first ranks of all hosts, and how many bytes this one has handed over to be sent."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self.rank, self.size = transport.rank, transport.world_size
        self.handed_over = 0

    def all_reduce(self, array: np.ndarray, op: str = "sum") -> np.ndarray:
        """Reduce an array over the hosts, "sum" or "mean", in place, and return it."""
        self.handed_over += array.nbytes
        self._transport.all_reduce(array, array, "sum")
        if op == "mean":  # the transport's own is over all ranks of the job
            array /= array.dtype.type(self.size)
        return array

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Return the hosts' arrays, (size, length)."""
        self.handed_over += array.nbytes
        rows = np.empty((self.size, array.size), array.dtype)
        self._transport.all_gather(array, rows.reshape(-1))
        return rows
