"""The `staged` transport: all-reduces of arrays in the ranks' own memory.

Small ones are copied to slots in memory that the ranks share. Of large ones each rank reads its shard of all ranks'
arrays, folds it, and reads the other shards' results, each byte in one copy between the processes. Where the kernel
does not allow that, a piece after the other goes through the slots, each so small that it is still in a core's cache
when it is folded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clcomm.host.bfloat16 import BFLOAT16
from clcomm.transport.base import PreparedAllReduce
from clcomm.transport.direct_reduction import LEAST_BYTES, DirectReduction
from clcomm.transport.reduction import RowsFold
from clcomm.transport.rendezvous import length_and_dtype
from clcomm.transport.slot_reduction import Slots


class StagedAllReduces:
    """Blocking all-reduces of arrays anywhere, between the ranks of one host.

    Args:
        slots: of the host's ranks.
        is_common: returns whether an array is in memory common to the ranks.
        direct: for large arrays; None: the ranks cannot read each other's memory.
    """

    name = "staged"

    def __init__(self, slots: Slots, is_common: Callable[[np.ndarray], bool], direct: DirectReduction | None = None):
        self._slots, self._is_common, self._direct = slots, is_common, direct
        self._folds: dict[tuple[str, np.dtype], RowsFold] = {}

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce `source` over the ranks into `out`, which may be the same array."""
        step, kind = self._slots.slot_bytes // source.itemsize, length_and_dtype(source)
        direct = None if source.dtype == BFLOAT16 else self._direct
        if direct is not None and source.nbytes >= LEAST_BYTES:
            direct.reduce(source, out, self._fold(op, source.dtype), kind)
            return
        if source.size <= step or source.dtype == BFLOAT16 or self._is_common(out):
            for start in range(0, max(source.size, 1), step):
                piece = source[start : start + step]
                self._slots.reduction(piece, op).reduce(piece, out[start : start + step], kind)
            return
        fold = self._fold(op, source.dtype)
        for start in range(0, source.size, step):
            piece = source[start : start + step]
            fold.into(self._slots.exchange(piece, kind), out[start : start + step])

    def _fold(self, op: str, dtype: np.dtype) -> RowsFold:
        found = self._folds.get((op, dtype))
        if found is None:
            found = self._folds[op, dtype] = RowsFold(op, dtype, self._slots.ranks)
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

    def __init__(self, staged: StagedAllReduces, source: np.ndarray, out: np.ndarray, op: str):
        self._staged, self._operands = staged, (source, out, op)

    def run(self) -> None:
        self._staged.all_reduce(*self._operands)
