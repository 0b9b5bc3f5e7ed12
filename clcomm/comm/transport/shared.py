"""The `shared` transport: reductions in an MPI shared-memory window, read in place.

All ranks of the host can read every rank's part of the window. Each rank folds its own shard of a range over all parts,
in rank order, into memory that all ranks read: with a `common` array as target every byte is read once and written
once. There are two rendezvous: at the first the ranks exchange the locations of their arrays, and after it all data is
written; after the second all shards are folded. Small arrays use slots instead: each rank copies its array into its
slot, and after a single rendezvous folds all slots itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from clcomm.comm.transport.base import require_aligned, require_alike
from clcomm.comm.transport.comparisons import Comparisons
from clcomm.comm.transport.fused import MOST_POLLS, FusedReduction, OwnPart, words_of
from clcomm.comm.transport.host_memory import HostMemory, MemoryTransport
from clcomm.comm.transport.mpi_failures import revoke
from clcomm.comm.transport.mpi_messages import exchange_arrays
from clcomm.comm.transport.mpi_runtime import Intracomm, Request
from clcomm.comm.transport.pending import Pending, StartOrder
from clcomm.comm.transport.reduction import Fold, prepared_reduction, reduce_in_rank_order
from clcomm.comm.transport.rendezvous import HostRendezvous, length_and_dtype
from clcomm.comm.transport.shards import shards
from clcomm.comm.transport.staged import Slots
from clcomm.comm.transport.started import Counters, StartedReduction
from clcomm.comm.transport.work_queue import WorkQueueReduction


class SharedTransport(MemoryTransport):
    """Collectives on arrays that `allocate` or `allocate_common` returned, or slices of them.

    Slices may have different offsets on different ranks.

    Args:
        comm: a communicator of one host's ranks, which this transport takes over.
        pending: the queue of unfinished operations; the transports of one Communicator share it.
        comparisons: of the transport for arrays in other memory; None: this one's own. Background all-reduces of both
            transports begin with them, so that ranks that use different ones detect the mismatch.

    Raises:
        MismatchError: on every rank, if lengths or dtypes differ.
    """

    name = "shared"
    rendezvous: HostRendezvous

    def __init__(self, comm: Intracomm, pending: deque[Pending] | None = None, comparisons: Comparisons | None = None):
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        self.memory = HostMemory(comm, _scratch_bytes(self.world_size))
        self.rendezvous = self.memory.rendezvous
        self._meet = self.memory.meet
        self.background = comm.Dup()
        self._comparisons = comparisons or Comparisons(comm, self.background)
        self._pending: deque[Pending] = deque() if pending is None else pending
        self._counters = Counters(self.memory)
        slots, notes = np.split(self.memory.scratch, [Slots.nbytes(self.world_size)])
        self.start_order = StartOrder(notes, self.rendezvous)
        self.slots = Slots(slots, self.rendezvous)
        self._small_bytes = self.slots.small_bytes

    @staticmethod
    def can_open(comm: Intracomm) -> bool:
        """Return whether /dev/shm has room for the transport, with the same result on every rank; collective."""
        ranks = comm.Get_size()
        return HostMemory.has_room(comm, _scratch_bytes(ranks) + HostRendezvous.nbytes(ranks))

    def fold_with(self, fold: Fold | None) -> None:
        super().fold_with(fold)
        self.slots.fold_with(fold)

    # --- collectives ---

    def barrier(self) -> None:
        self.rendezvous.barrier()

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        if 0 < source.nbytes <= self._small_bytes:
            self.slots.reduction(source, op).reduce(source, out)
            return
        everyone = self.rendezvous.exchange(self.memory.places(source, out), length_and_dtype(source))
        self._kept_reduction(source, out, op, everyone)()
        self.rendezvous.leave()

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        everyone = self.rendezvous.exchange(self.memory.places(source, out), length_and_dtype(source))
        fused = self._fused_reduction(source, out, op, everyone)
        if fused is not None:
            return fused
        if 0 < source.nbytes <= self._small_bytes:
            return partial(self.slots.reduction(source, op).reduce, source, out)
        fold = self._shard_reduction(source, out, op, everyone)
        return partial(_fold_between, self.rendezvous, fold)

    def _fused_reduction(
        self, source: np.ndarray, out: np.ndarray, op: str, everyone: np.ndarray
    ) -> FusedReduction | None:
        """Return the all-reduce in one kernel; None unless every rank's fold can prepare it. Collective."""
        sources, targets = self.memory.counterparts((source, out), everyone)
        prepare = getattr(self.fold, "with_rendezvous", None)
        fused: FusedReduction | None = None
        if prepare is not None and op in ("sum", "mean") and len(self.memory.distinct(targets)) == 1:
            rendezvous, kind = self.rendezvous, length_and_dtype(source)
            part, divisor = shards(source, self.world_size)[self.rank], self.world_size if op == "mean" else 1
            prepared = partial(prepare, sources, targets[0], divisor, part, rendezvous.cells)
            if rendezvous.polls:
                words = words_of(rendezvous, MOST_POLLS)
                fold = self._shard_reduction(source, out, op, everyone)
                fused = OwnPart(rendezvous, kind, words.data, prepared(words), fold=fold)
            else:
                fused = WorkQueueReduction(rendezvous, kind, out, partial(prepared, shares=True))
        elif source.nbytes <= self.slots.slot_bytes:
            fused = self.slots.in_one_kernel(source, op, length_and_dtype(source), (source, out))
        works = fused is not None and fused.launch is not None
        return fused if self.rendezvous.exchange([works])[:, 0].all() else None

    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        compared, everyone = self._comparisons.begin(self.rendezvous.tag, self.memory.places(source, out))

        fold = partial(self._compare_and_fold, source, out, op, everyone)
        return Pending(self._pending, compared, fold, meets=True)

    def _compare_and_fold(self, source: np.ndarray, out: np.ndarray, op: str, everyone: np.ndarray) -> Request:
        """Reduce once all ranks have come, whose rows of the comparison these are; the request is for their end."""
        require_alike(everyone, arrays=2)
        require_aligned(source, out)
        self._kept_reduction(source, out, op, everyone[:, 1:])()
        return self.background.Ibarrier()

    def prepare_start(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], Pending]:
        everyone = self.rendezvous.exchange(self.memory.places(source, out), length_and_dtype(source))
        counters = self._counters.take()
        if counters is None:
            return super().prepare_start(source, out, op)
        fold = self._shard_reduction(source, out, op, everyone)
        return StartedReduction(self.memory, counters, self._pending, fold).start

    def _kept_reduction(self, source: np.ndarray, out: np.ndarray, op: str, everyone: np.ndarray) -> Callable[[], None]:
        """Return the cached `_shard_reduction` of these places."""
        key = (op, everyone.tobytes())
        return self.memory.kept(key, lambda: self._shard_reduction(source, out, op, everyone))

    def _shard_reduction(
        self, source: np.ndarray, out: np.ndarray, op: str, everyone: np.ndarray
    ) -> Callable[[], None]:
        """Return a function that folds this rank's shard of a range; everyone: all ranks' `places`."""
        sources, targets = self.memory.counterparts((source, out), everyone)
        shard = shards(sources[0], self.world_size)[self.rank]
        first, *others = [target[shard] for target in self.memory.distinct(targets)]
        # The fold may write to the first target, rank 0's, unless that memory is also a later row of the sum: it is
        # row 0 when the caller reduces in place, and no row when `out` is in another region.
        return prepared_reduction([source[shard] for source in sources], first, op, fold=self.fold, copies=others)

    def broadcast(self, array: np.ndarray, root: int) -> None:
        (parts,) = self._meet(array)
        if len(self.memory.distinct([parts[root], array])) > 1:
            np.copyto(array, parts[root])
        self.rendezvous.barrier()

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        (parts,) = self._meet(source)
        np.concatenate(parts, out=out)
        self.rendezvous.barrier()

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        (parts,) = self._meet(source)
        block = slice(self.rank * out.size, (self.rank + 1) * out.size)
        result = np.empty_like(out)  # `out` may be in a part that other ranks still read
        reduce_in_rank_order([part[block] for part in parts], result, op)
        self.rendezvous.barrier()
        np.copyto(out, result)

    def all_to_all(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        exchange_arrays(self.memory.comm, sends, receives)

    def close(self) -> None:
        self._counters.close()
        self.memory.close()
        self.background.Free()

    def revoke(self) -> None:
        revoke(self.memory.comm, self.background)


def _fold_between(rendezvous: HostRendezvous, fold: Callable[[], None]) -> None:
    """Fold this rank's shard between two rendezvous."""
    rendezvous.barrier()
    fold()
    rendezvous.leave()


def _scratch_bytes(world_size: int) -> int:
    return Slots.nbytes(world_size) + StartOrder.nbytes(world_size)
