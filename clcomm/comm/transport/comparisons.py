"""Comparisons through MPI: each rank sends a row that describes the operation that it has come to.

All that compares the ranks of a Communicator through MPI sends rows of one length, in the order of the rank's calls. So
ranks that came to different operations, be they started in the background or blocking, find that out from the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clcomm.comm.transport.mpi_runtime import Intracomm, Request
from clcomm.comm.transport.pending import complete

#: Words (int64) of a row: a tag, and the `places` of two arrays.
_WORDS = 9


#: In place of a dtype's number: no array is described.
_NO_ARRAY = -1


class Comparisons:
    """Compares the ranks of a communicator.

    Args:
        comm: an mpi4py communicator, on which rows are sent.
        apart: a duplicate of it, for what ranks tell each other once they differ.
    """

    def __init__(self, comm: Intracomm, apart: Intracomm):
        self._comm, self._apart = comm, apart
        self._ranks = comm.Get_size()
        self._begun = 0
        self._own, self._everyone = self._rows()

    def begin(self, tag: int, places: Sequence[int]) -> tuple[Request, np.ndarray]:
        """Send a row without blocking; return the request, and the rows of all ranks once it is complete.

        places: of two arrays, 8 numbers.
        """
        own, everyone = self._rows()
        own[0], own[1:] = tag, places
        return self._send(own, everyone), everyone

    def alike(self, tag: int, arrived_ns: int) -> tuple[bool, list[int]]:
        """Return whether all ranks have this tag, and each one's arrival; collective.

        arrived_ns: this rank's arrival, by perf_counter_ns; ranks are on one host. A rank that waits in it advances its
        operations on other communicators.
        """
        self._own[0], self._own[1] = tag, arrived_ns
        complete(self._send(self._own, self._everyone))
        tags, arrivals = self._everyone[:, :2].T.tolist()
        return tags.count(tag) == len(tags), arrivals

    def exchange(self, value: Any) -> list[Any]:
        """Return all ranks' values, once ranks differ: what any has begun is then complete on all. Collective."""
        counts, values = zip(*self._apart.allgather((self._begun, value)), strict=True)
        for _ in range(max(counts) - self._begun):
            self._send(*self._rows()).Wait()
        return list(values)

    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        return np.full(_WORDS, _NO_ARRAY, np.int64), np.empty((self._ranks, _WORDS), np.int64)

    def _send(self, own: np.ndarray, everyone: np.ndarray) -> Request:
        self._begun += 1
        return self._comm.Iallgather(own, everyone)
