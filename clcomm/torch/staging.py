"""Shared memory through which ordinary tensors are reduced: one copy in, the ranks' sum, one copy out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from clcomm.communicator import Communicator

#: The size of the memory at first, and at most; longer tensors are reduced in pieces of that size, which stay in the
#: processor's cache between copy, sum and copy.
LEAST_BYTES, MOST_BYTES = 64 << 10, 4 << 20


class Staging:
    """A rank's row, which the other ranks read, and the sum, which all of them write and read; both grow as needed."""

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._row = self._sum = np.empty(0, np.uint8)
        self._typed: dict[torch.dtype, Pair] = {}

    def pair(self, nbytes: int, dtype: torch.dtype, purpose: Callable[[], str]) -> Pair:
        """Return memory for `nbytes`, or the most there is; collective where it has to grow.

        Args:
            nbytes: the same on every rank.
            dtype: of the tensors.
            purpose: returns what messages call the collective that it is for.
        """
        if nbytes > self._row.nbytes and self._row.nbytes < MOST_BYTES:
            self._grow(min(MOST_BYTES, max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())), purpose())
        found = self._typed.get(dtype)
        if found is None:
            found = self._typed[dtype] = Pair(self._row, self._sum, dtype)
        return found

    def _grow(self, nbytes: int, purpose: str) -> None:
        row = self._comm.allocate(nbytes, purpose=purpose)
        self._typed.clear()  # the former memory is free for the next one
        self._row = row
        self._sum = self._comm.allocate_common(nbytes)


class Pair:
    """A row and the sum as tensors of one dtype, and as arrays on the same memory."""

    def __init__(self, row: np.ndarray, total: np.ndarray, dtype: torch.dtype):
        self.row, self.sum = torch.from_numpy(row).view(dtype), torch.from_numpy(total).view(dtype)
        self.row_array, self.sum_array = self.row.numpy(), self.sum.numpy()
        self.count = self.row.numel()
