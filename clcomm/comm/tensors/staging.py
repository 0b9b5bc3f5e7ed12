"""Shared memory for the reduction of ordinary tensors: one copy in, the ranks' sum, one copy out.

Tensors that are in shared memory themselves are reduced in place, beside those that other ranks copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors.arrays import array_of, changed, copy_values, dtype_name

#: The size of the memory at first, and at most; longer tensors are reduced in pieces of that size, which stay in the
#: processor's cache between copy, sum and copy.
LEAST_BYTES, MOST_BYTES = 64 << 10, 4 << 20


class Staging:
    """A rank's row, read by the other ranks, and the sum, written and read by all; both grow as needed.

    comm: a Communicator, or a weak proxy of one, that shares memory.
    """

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._row = self._sum = np.empty(0, np.uint8)
        self._holds_at: Callable[[int, int], bool]
        self._typed: dict[torch.dtype, Pair] = {}

    def all_reduce(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        op: str,
        *,
        summed: torch.dtype,
        label: str = "",
        bucket: int = -1,
        compared: str | None = None,
    ) -> None:
        """Reduce a tensor over the ranks, counted as one all-reduce even if it is longer than the memory; collective.

        No byte is copied if `source` is the target and in the Communicator's memory; ranks may differ in that.

        Args:
            source: flat and contiguous, in the host's memory.
            target: receives the result; of the same length, or `source` itself.
            op, label, bucket, compared: as for `Communicator.all_reduce`.
            summed: the dtype of the sum; the result is rounded to that of `target`.
        """
        count, nbytes = source.numel(), source.nbytes
        run = partial(self._comm.all_reduce, op=op, label=label, nbytes=nbytes, bucket=bucket, compared=compared)

        def purpose() -> str:
            name = f"{label!r} of" if compared is None else "of"  # ranks may differ in what they do not compare
            return f"all_reduce {name} {count:,} {dtype_name(source.dtype)}"

        pair = self.pair(count * summed.itemsize, summed, purpose)
        row, total, row_array, sum_array = pair.row, pair.sum, pair.row_array, pair.sum_array
        in_place = source is target and source.dtype is summed and self._holds_at(source.data_ptr(), nbytes)

        def reduce(part: torch.Tensor, into: torch.Tensor) -> None:
            if in_place:
                run(array_of(part))
                changed(part)
                return
            length = part.numel()
            copy_values(row[:length], part)
            run(row_array[:length], out=sum_array[:length])
            copy_values(into, total[:length])

        def reduce_pieces() -> int:
            for part, into in zip(source.split(pair.count), target.split(pair.count), strict=True):
                reduce(part, into)
            return nbytes

        if count <= pair.count or self._comm.memory.all_agree(in_place, purpose()):
            reduce(source, target)
        else:
            self._comm.run_as_all_reduce(reduce_pieces, label=label, nbytes=nbytes, bucket=bucket)

    def pair(self, nbytes: int, dtype: torch.dtype, purpose: Callable[[], str]) -> Pair:
        """Return memory for `nbytes`, or the most there is; collective where it has to grow.

        Args:
            purpose: returns the collective's name in messages.
        """
        if max(1, nbytes) > self._row.nbytes and self._row.nbytes < MOST_BYTES:
            self._grow(min(MOST_BYTES, max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())), purpose())
        found = self._typed.get(dtype)
        if found is None:
            found = self._typed[dtype] = Pair(self._row, self._sum, dtype)
        return found

    def _grow(self, nbytes: int, purpose: str) -> None:
        row = self._comm.allocate(nbytes, purpose=purpose)
        memory = self._comm.memory.of_host
        assert memory is not None, "a Communicator that shares none"
        self._holds_at = memory.holds_at
        self._typed.clear()  # the former memory is free for the next one
        self._row = row
        self._sum = self._comm.allocate_common(nbytes)


class Pair:
    """A row and the sum as tensors of one dtype, and as arrays on the same memory."""

    def __init__(self, row: np.ndarray, total: np.ndarray, dtype: torch.dtype):
        self.row, self.sum = torch.from_numpy(row).view(dtype), torch.from_numpy(total).view(dtype)
        self.row_array, self.sum_array = array_of(self.row), array_of(self.sum)
        self.count = self.row.numel()
