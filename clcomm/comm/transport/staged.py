"""The `staged` transport: collectives on arrays in the ranks' own memory.

Small arrays are copied to slots in memory that the ranks share. Of large ones a rank reads the parts that it needs from
the others' arrays, each byte in one copy between the processes. Where the kernel does not allow that, a piece after the
other goes through the slots, each so small that it is still in a core's cache when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from clcomm.base.host.arrays import BFLOAT16, PAGE, aligned_empty
from clcomm.comm.transport.base import BlockingCollectives
from clcomm.comm.transport.direct_exchange import LEAST_BYTES, LEAST_READ_BYTES, DirectExchange
from clcomm.comm.transport.fused import COMPLETE, MOST_POLLS, STATE, FusedReduction, OwnPart, words_of
from clcomm.comm.transport.host_memory import KEPT
from clcomm.comm.transport.reduction import Fold, RowsFold, prepared_reduction, rows_fold
from clcomm.comm.transport.rendezvous import HostRendezvous, length_and_dtype
from clcomm.comm.transport.work_queue import WorkQueueReduction


class StagedCollectives(BlockingCollectives):
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
        self._kernels: dict[tuple[int, np.dtype, str], FusedReduction | int | None] = {}  # or uses so far
        #: Called on every rank before it looks for a kernel.
        self.choose_fold: Callable[[], object] = lambda: None

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        step, kind = self._slots.slot_bytes // source.itemsize, length_and_dtype(source)
        direct = None if source.dtype == BFLOAT16 else self._direct
        if direct is not None and source.nbytes >= LEAST_BYTES:
            direct.reduce(source, out, self._fold(op, source.dtype), kind)
            return
        if source.nbytes <= self._slots.slot_bytes:
            self._reduce_small(source, out, op, kind)
            return
        if source.size <= step or source.dtype == BFLOAT16 or self._is_common(out):
            for cut in _cuts(source.size, step):
                piece = source[cut]
                self._slots.reduction(piece, op).reduce(piece, out[cut], kind)
            return
        fold = self._fold(op, source.dtype)
        for cut in _cuts(source.size, step):
            fold(self._slots.exchange(source[cut], kind), out[cut])

    def _reduce_small(self, source: np.ndarray, out: np.ndarray, op: str, kind: int) -> None:
        """Reduce through the slots: by a kernel, once so many all-reduces of such arrays have been."""
        key = source.nbytes, source.dtype, op
        found = self._kernels.get(key, 0)
        if found == USES_BEFORE_KERNEL:
            self.choose_fold()
            kernel = self._slots.in_one_kernel(source, op, kind + _IN_KERNEL)
            found = self._kernels[key] = kernel if self._slots.all_agree(kernel is not None, _AGREEING) else None
        if found is not None and not isinstance(found, int):
            found.arrays = source, out
            found()
            found.arrays = ()
            return
        self._slots.reduction(source, op).reduce(source, out, kind)
        # On all ranks, as they have compared the call. Nothing is forgotten, as ranks may have plans with a kernel.
        if found is not None and (key in self._kernels or len(self._kernels) < KEPT):
            self._kernels[key] = found + 1

    def broadcast(self, array: np.ndarray, root: int) -> None:
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

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        kind, kernel = length_and_dtype(source), None
        if source.nbytes <= self._slots.slot_bytes:
            kernel = self._slots.in_one_kernel(source, op, kind, (source, out))
        if self._slots.all_agree(kernel is not None, kind):
            assert kernel is not None, "this rank has agreed"
            return kernel
        return super().prepare_all_reduce(source, out, op)

    def kernel_for(self, array: np.ndarray, op: str) -> FusedReduction | None:
        """Return the kernel that does all-reduces of such arrays, once the ranks have agreed on one."""
        found = self._kernels.get((array.nbytes, array.dtype, op))
        return None if isinstance(found, int) else found


def _cuts(size: int, step: int) -> Iterator[slice]:
    """Yield the slices, at least one, of `step` elements each: ranks meet for an empty array too."""
    for start in range(0, max(size, 1), step):
        yield slice(start, start + step)


# --- Reductions through slots: each rank copies its array into its slot, and folds all slots after one rendezvous. ---
# There are two slots for each rank, used in turn, so that a late rank may still read those of the call before; and a
# third for kernels, which end with a rendezvous of their own, or once all of the common result is summed.

#: With so many all-reduces of one length, dtype and operation behind them, ranks look for a kernel that does the next
#: ones. Fewer would not repay the time to open the device and to compile the kernel.
USES_BEFORE_KERNEL = 256
#: What ranks that do so add to their call's tag, and what the kernel does, whose rows are elsewhere than Python's: no
#: array of the call has these lengths and dtypes.
_AGREEING, _IN_KERNEL = 62, 61
#: Arrays in shared memory up to this size use slots; of larger ones, a fold on every rank costs more than a rendezvous.
SMALL_ARRAY_BYTES = 8 << 10
#: The same where ranks share cores, for all ranks' arrays together: a rendezvous then takes several context switches.
SHARED_CORES_SLOTS_BYTES = 128 << 10
#: The most bytes of a slot, and of the slots of one side together. A piece of an array in other memory, two slots and
#: the result are to stay in a core's second-level cache.
SLOT_BYTES, SLOTS_BYTES = 64 << 10, 4 << 20


class Slots:
    """The slots of the ranks of a host.

    Args:
        memory: `nbytes` bytes that all ranks share.
        rendezvous: the ranks' rendezvous.

    Attributes:
        rendezvous: the ranks'.
        small_bytes: the most bytes of an array in shared memory for which slots are faster.
        slot_bytes: the size of a slot.
        ranks: their number.
    """

    def __init__(self, memory: np.ndarray, rendezvous: HostRendezvous):
        self.ranks = ranks = len(rendezvous.cells)
        self.slot_bytes = _slot_bytes(ranks)
        self.small_bytes = SMALL_ARRAY_BYTES
        if not rendezvous.polls:
            self.small_bytes = max(SMALL_ARRAY_BYTES, SHARED_CORES_SLOTS_BYTES // ranks // PAGE * PAGE)
        slots, self._common_result = np.split(memory, [3 * ranks * self.slot_bytes])
        *self._slots, self._of_kernels = slots.reshape(3, ranks, self.slot_bytes)
        self._result = aligned_empty((self.slot_bytes,), np.uint8)
        self.rendezvous = rendezvous
        self._fold: Fold | None = None
        self._reductions: dict[tuple[object, ...], SlotReduction] = {}

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the bytes of all slots."""
        return (3 * ranks + 1) * _slot_bytes(ranks)

    def fold_with(self, fold: Fold | None) -> None:
        """Compute later sums with `fold` where it supports them."""
        self._fold = fold
        self._reductions.clear()

    def all_agree(self, answer: bool, kind: int) -> bool:
        """Return whether all ranks answer True; collective. kind: see Rendezvous."""
        return bool(self.rendezvous.exchange([answer], kind)[:, 0].all())

    def exchange(self, piece: np.ndarray, kind: int, writes: bool = True) -> np.ndarray:
        """Return all ranks' pieces, (ranks, elements), until the exchange after the next.

        kind: see Rendezvous. writes: whether this rank's is wanted, which is undefined otherwise.
        """
        side = self._slots[self.rendezvous.parity][:, : piece.nbytes].view(piece.dtype)
        if writes:
            side[self.rendezvous.rank] = piece
        self.rendezvous.barrier(kind)
        return side

    def in_one_kernel(
        self, source: np.ndarray, op: str, kind: int, arrays: tuple[np.ndarray, ...] = ()
    ) -> FusedReduction | None:
        """Return the all-reduce of at most `slot_bytes` in one kernel; None where this rank's fold has none.

        arrays: operand and result; none: whoever calls it sets them before.
        """
        prepare, polls = getattr(self._fold, "with_rendezvous", None), self.rendezvous.polls
        if prepare is None or op not in ("sum", "mean") or not source.nbytes:
            return None
        rows = [slot[: source.nbytes].view(source.dtype) for slot in self._of_kernels]
        result = (self._result if polls else self._common_result)[: source.nbytes].view(source.dtype)
        divisor, whole, cells = self.ranks if op == "mean" else 1, slice(0, source.size), self.rendezvous.cells
        inner: FusedReduction
        if polls:
            words = words_of(self.rendezvous, MOST_POLLS)
            launch = prepare(rows, result, divisor, whole, cells, words)
            inner = OwnPart(self.rendezvous, kind, words.data, launch, fold=prepared_reduction(rows, result, op))
        else:
            prepared = partial(prepare, rows, result, divisor, whole, cells, shares=True)
            inner = WorkQueueReduction(self.rendezvous, kind, result, prepared)
        return None if inner.launch is None else _InSlots(self.rendezvous, inner, rows, result, arrays)

    def reduction(self, like: np.ndarray, op: str) -> SlotReduction:
        """Return the cached reduction of arrays like this one, of at most `slot_bytes`."""
        key = (like.nbytes, like.dtype, op)
        found = self._reductions.get(key)
        if found is None:
            if len(self._reductions) >= KEPT:
                self._reductions.clear()
            found = self._reductions[key] = SlotReduction(
                self.rendezvous, self._slots, self._result[: like.nbytes].view(like.dtype), op, self._fold
            )
        return found


class SlotReduction:
    """Arrays of one kind, at most a slot's size, with a single rendezvous: each rank folds all slots.

    The next call uses the other slots, so a late rank may still read these. Only final values are written to the
    result, which a neighbour may already be reading.

    Args:
        rendezvous: the ranks' rendezvous.
        slots: two of each rank: (ranks, bytes) twice.
        result: an array of that kind, for the time of a call.
        op: a key of FOLDS.
        fold: sums what it supports.
    """

    def __init__(
        self, rendezvous: HostRendezvous, slots: Sequence[np.ndarray], result: np.ndarray, op: str, fold: Fold | None
    ):
        sides = [[slot[: result.nbytes].view(result.dtype) for slot in side] for side in slots]
        self._own, self._result = [rows[rendezvous.rank] for rows in sides], result
        self._folds = [prepared_reduction(rows, result, op, fold=fold) for rows in sides]
        self._rendezvous, self._kind = rendezvous, length_and_dtype(result)

    def reduce(self, source: np.ndarray, out: np.ndarray, kind: int | None = None) -> None:
        """Reduce `source` over the ranks into `out`; kind: of the array of which these are a piece, see Rendezvous."""
        parity = self._rendezvous.parity
        self._own[parity][...] = source
        self._rendezvous.barrier(self._kind if kind is None else kind)
        self._folds[parity]()
        out[...] = self._result


class _InSlots(FusedReduction):
    """A kernel's all-reduce of the slots, to which each rank copies its array, and from which it copies the result."""

    def __init__(
        self, rendezvous: HostRendezvous, inner: FusedReduction, rows: list[np.ndarray], result: np.ndarray,
        arrays: tuple[np.ndarray, ...],
    ):  # fmt: skip
        super().__init__(rendezvous, inner.kind, inner.words, self._copy_and_launch)
        self._own, self._inner, self._kernel, self._result = rows[rendezvous.rank], inner, inner.launch, result
        self.arrays = arrays

    def _copy_and_launch(self) -> None:
        source, out = self.arrays
        self._own[...] = source
        self._kernel()  # type: ignore[misc]
        if self.words[STATE] == COMPLETE:
            out[...] = self._result

    def complete(self) -> None:
        is_copied = self.words[STATE] == COMPLETE
        self._inner.complete()
        if not is_copied:
            self.arrays[1][...] = self._result


def _slot_bytes(ranks: int) -> int:
    """Return the size of a slot: whole pages."""
    return max(SMALL_ARRAY_BYTES, min(SLOT_BYTES, SLOTS_BYTES // ranks // PAGE * PAGE))
