"""The `staged` transport: collectives on arrays in the ranks' own memory.

Small arrays are copied to slots in memory that the ranks share. Of large ones a rank reads the parts that it needs from
the others' arrays, each byte in one copy between the processes. Where the kernel does not allow that, a piece after the
other goes through the slots, each so small that it is still in a core's cache when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from clcomm.base.host.bfloat16 import BFLOAT16
from clcomm.comm.transport.base import PreparedAllReduce
from clcomm.comm.transport.direct_exchange import LEAST_BYTES, LEAST_READ_BYTES, DirectExchange
from clcomm.comm.transport.reduction import RowsFold, rows_fold
from clcomm.comm.transport.rendezvous import length_and_dtype
from clcomm.comm.transport.slot_reduction import Slots


class StagedCollectives:
    """Blocking collectives on arrays anywhere, between the ranks of one host.

    Args:
        slots: of the host's ranks.
        is_common: returns whether an array is in memory common to the ranks.
        direct: for large arrays; None: the ranks cannot read each other's memory.
    """

    name = "staged"

    def __init__(self, slots: Slots, is_common: Callable[[np.ndarray], bool], direct: DirectExchange | None = None):
        self._slots, self._is_common, self._direct = slots, is_common, direct
        self._rank = slots.rendezvous.rank
        self._folds: dict[tuple[str, np.dtype], RowsFold] = {}

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce `source` over the ranks into `out`, which may be the same array."""
        step, kind = self._slots.slot_bytes // source.itemsize, length_and_dtype(source)
        direct = None if source.dtype == BFLOAT16 else self._direct
        if direct is not None and source.nbytes >= LEAST_BYTES:
            direct.reduce(source, out, self._fold(op, source.dtype), kind)
            return
        if source.size <= step or source.dtype == BFLOAT16 or self._is_common(out):
            for cut in _cuts(source.size, step):
                piece = source[cut]
                self._slots.reduction(piece, op).reduce(piece, out[cut], kind)
            return
        fold = self._fold(op, source.dtype)
        for cut in _cuts(source.size, step):
            fold(self._slots.exchange(source[cut], kind), out[cut])

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Copy the root's array into that of every other rank."""
        kind, is_root = length_and_dtype(array), self._rank == root
        if self._direct is not None and array.nbytes >= LEAST_READ_BYTES:
            self._direct.broadcast(array, root, kind)
            return
        values = array.view(np.uint8)
        for cut in _cuts(values.size, self._slots.slot_bytes):
            rows = self._slots.exchange(values[cut], kind, writes=is_root)
            if not is_root:
                values[cut] = rows[root]

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        """Put rank r's `source` at block r of `out`, on every rank."""
        kind = length_and_dtype(source)
        if self._direct is not None and source.nbytes >= LEAST_READ_BYTES:
            self._direct.all_gather(source, out, kind)
            return
        values, blocks = source.view(np.uint8), out.view(np.uint8).reshape(self._slots.ranks, source.nbytes)
        if len(values) > self._slots.slot_bytes and np.may_share_memory(source, out):
            values = values.copy()  # a piece may be written over a later one of the source
        for cut in _cuts(values.size, self._slots.slot_bytes):
            np.copyto(blocks[:, cut], self._slots.exchange(values[cut], kind))

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce block r of `source` over the ranks into `out` of rank r."""
        kind, ranks, fold = length_and_dtype(source), self._slots.ranks, self._fold(op, source.dtype)
        if self._direct is not None and source.nbytes >= LEAST_BYTES:
            self._direct.reduce_scatter(source, out, fold, kind)
            return
        blocks = source.reshape(ranks, out.size)
        if source.nbytes > self._slots.slot_bytes and np.may_share_memory(source, out):
            blocks = blocks.copy()
        for cut in _cuts(out.size, self._slots.slot_bytes // source.itemsize // ranks):
            rows = self._slots.exchange(blocks[:, cut].reshape(-1), kind)
            fold(rows.reshape(ranks, ranks, rows.shape[1] // ranks)[:, self._rank], out[cut])

    def _fold(self, op: str, dtype: np.dtype) -> RowsFold:
        """Return the function that folds all ranks' rows into an array, in rank order."""
        found = self._folds.get((op, dtype))
        if found is None:
            found = self._folds[op, dtype] = rows_fold(op, dtype, self._slots.ranks)
        return found

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> PreparedAllReduce:
        """Return this all-reduce on the same memory at each `run`; collective."""
        kind, kernel = length_and_dtype(source), None
        if source.nbytes <= self._slots.slot_bytes:
            kernel = self._slots.in_one_kernel(source, out, op, kind)
        if self._slots.all_agree(kernel is not None, kind):
            assert kernel is not None, "this rank has agreed"
            return kernel
        return _StagedAllReduce(self, source, out, op)


class _StagedAllReduce(PreparedAllReduce):
    """An all-reduce for which nothing is prepared."""

    def __init__(self, staged: StagedCollectives, source: np.ndarray, out: np.ndarray, op: str):
        self._staged, self._operands = staged, (source, out, op)

    def run(self) -> None:
        self._staged.all_reduce(*self._operands)


def _cuts(size: int, step: int) -> Iterator[slice]:
    """Yield the slices, at least one, of `step` elements each: ranks meet for an empty array too."""
    for start in range(0, max(size, 1), step):
        yield slice(start, start + step)
