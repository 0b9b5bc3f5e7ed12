"""The Communicator: NumPy arrays and objects between ranks, checked, timed and counted.

Each collective is one short method: check the arguments, let a transport move the data, tell the observers.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from clcomm import job
from clcomm.arguments import (
    address_of,
    agreed_size,
    aligned_zeros,
    check_op,
    check_root,
    flat,
    kind_of,
    scatter_header,
    size_or_error,
    writable,
)
from clcomm.errors import ArgumentError
from clcomm.handle import Handle
from clcomm.lizardist import LizarDistCalls
from clcomm.objects import ObjectCollectives
from clcomm.stats import Collective, CommStats, Observer, Phase
from clcomm.transport import Pending, SoloTransport, Transport
from clcomm.transport import mpi as mpi_transport
from clcomm.transport.hierarchical import HierarchicalTransport
from clcomm.transport.hosts import Hosts
from clcomm.transport.memory import MemoryTransport
from clcomm.transport.reduction import prepared_reduction, reduce_by_hosts
from clcomm.transport.shared import SharedTransport
from clcomm.units import format_size, parse_size

TRANSPORTS = ("auto", "shared", "mpi", "solo")

_log = logging.getLogger("clcomm")


class Communicator(ObjectCollectives, LizarDistCalls):
    """The ranks of a job and the collectives between them.

    comm: an mpi4py communicator; None takes COMM_WORLD, and a world of one where there is no MPI. Either way a
        private duplicate carries the traffic. Creating a Communicator is collective.
    bucket_size: bytes, or text such as "4MiB": how much of the gradients one all-reduce takes.
    use_bucketing: False reduces each gradient on its own.
    transport: "auto" reduces what `allocate` returned in the shared memory of each host, and moves the rest, and what
        goes between hosts, through MPI; "mpi" never uses shared memory; "shared" insists on it, on one host.
    observers: told about every finished collective, after `stats`.

    Raises ArgumentError for a bad argument and LaunchError when mpiexec belongs to another MPI.
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        bucket_size: int | str = "1MiB",
        use_bucketing: bool = True,
        transport: str = "auto",
        observers: Iterable[Observer] = (),
    ):
        if mpi_transport.launched_ranks() > 1:
            job.install_excepthook()  # first of all, so that a refused argument ends the other ranks too
        self.bucket_size = parse_size(bucket_size)
        self.use_bucketing = use_bucketing
        if transport not in TRANSPORTS:
            raise ArgumentError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
        self.comm: Any = None
        self._base: Transport = SoloTransport()
        self._shared: MemoryTransport | None = None
        self._pending: deque[Pending] = deque()
        self._finalized = False
        self.local_rank, self.local_size = 0, 1
        self.host, self.hosts = 0, 1
        self._join(comm, transport)
        self.rank, self.size = self._base.rank, self._base.world_size
        self.cores = self._share_of_cores()
        self.stats = CommStats(self.size)
        self._observers: list[Observer] = []
        self._phase_observers: list[Callable[[Phase], None]] = []
        for observer in (self.stats, *observers):
            self.add_observer(observer)
        self._sequence = 0
        self._parts: list[Collective] | None = None  # collectives that count as parts of another
        self._warned_fallback = False

    def _join(self, comm: Any, transport: str) -> None:
        if transport == "solo":
            return
        try:
            parent = mpi_transport.world() if comm is None else mpi_transport.checked(comm)
        except ImportError:
            _log.info("mpi4py found no MPI library: a world of one")
            return
        self.comm = mpi_transport.duplicate(parent)
        if self.comm.Get_size() == 1 and transport != "mpi":
            return
        host = mpi_transport.host_of(self.comm)
        self.local_rank, self.local_size = host.Get_rank(), host.Get_size()
        hosts = Hosts.of(self.comm, host)
        self.host, self.hosts = hosts.host_of(self.comm.Get_rank()), len(hosts)
        if transport == "shared" and self.hosts > 1:
            raise ArgumentError("transport: 'shared' needs all ranks on one host; use 'auto' or 'mpi'")
        self._base = base = mpi_transport.MpiTransport(self.comm, self._pending)
        if transport == "auto" and hosts.nested:
            # So that results have the same bits where an array cannot be reduced in shared memory.
            base.fold = partial(reduce_by_hosts, hosts=hosts.ranks)
        if transport == "auto" and hosts.nested and HierarchicalTransport.can_open(self.comm, host):
            self._shared = HierarchicalTransport(base, host, hosts)
        elif transport != "mpi" and self.hosts == 1 and SharedTransport.can_open(host):
            self._shared = SharedTransport(host, self._pending)
        else:
            host.Free()
        job.install_excepthook()

    def _share_of_cores(self) -> int:
        """Return how many cores this rank may call its own: those it may run on, over the ranks that share them."""
        mine = (os.uname().nodename, tuple(sorted(os.sched_getaffinity(0))))
        sharers = self._all_gather_object(mine).count(mine)
        return max(1, len(mine[1]) // sharers)

    # --- who and where ---

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.size

    # --- memory ---

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return a zeroed uint8 array of this rank; in shared memory where the transport has it. Collective."""
        return self._allocate(nbytes, common=False)

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return a zeroed uint8 array that is one memory on all ranks where they share a host. Collective.

        As `out` of an all-reduce it lets each byte of a result be written once. Elsewhere it is an ordinary array.
        """
        return self._allocate(nbytes, common=True)

    def _allocate(self, nbytes: int, common: bool) -> np.ndarray:
        nbytes = agreed_size(self._all_gather_object(size_or_error(nbytes, "nbytes")))
        if self._shared is not None:
            self._shared.free_unused()
            if self._shared.fits(nbytes, common):
                return self._shared.allocate_common(nbytes) if common else self._shared.allocate(nbytes)
            self._warn_fallback(nbytes)
        return aligned_zeros(nbytes)

    def _warn_fallback(self, nbytes: int) -> None:
        if self.rank == 0 and not self._warned_fallback:
            _log.warning(
                "/dev/shm has no room for %s a rank on %d ranks: reducing through MPI instead; enlarge it "
                "(docker run --shm-size=1g) for faster synchronisation",
                format_size(nbytes),
                self.size,
            )
        self._warned_fallback = True

    # --- collectives on arrays ---

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._run("barrier", "", 0, self._base, self._base.barrier)

    def rendezvous(self) -> None:
        """Return when every rank has called it, as a barrier for long waits: it leaves the cores to ranks that work.

        Other collectives answer within microseconds, but keep a core busy until all ranks are there; this one sleeps
        for milliseconds. It is not counted.
        """
        self._settle()
        if self.comm is not None:
            mpi_transport.wait_patiently(self.comm.Ibarrier())

    def all_reduce(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        label: str = "",
        nbytes: int | None = None,
        bucket: int = -1,
    ) -> np.ndarray:
        """Reduce an array over the ranks and return the result, the same bits on every rank.

        The order is that of the ranks; with several ranks on several hosts "auto" reduces within each host first, then
        in the order of the hosts' lowest ranks.

        array: any shape and numeric dtype, the same on every rank. op: "sum", "mean" (floating dtypes), "min" or
        "max". out: where the result goes, of the same shape and dtype; None reduces in place. label: the name under
        which it is counted. nbytes: the size to count, where part of the array is padding. bucket: which bucket of
        the gradients it is, for the observers.
        """
        source, target, finish = self._reduction_operands(array, op, out)
        chosen = self._transport_for(source, target)
        size = source.nbytes if nbytes is None else nbytes
        self._run("all_reduce", label, size, chosen, lambda: chosen.all_reduce(source, target, op), bucket)
        return finish()

    def all_reduce_init(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        label: str = "",
        nbytes: int | None = None,
        bucket: int = -1,
    ) -> Callable[[], None]:
        """Return an all-reduce that is prepared once and called each time it is needed; arguments as for `all_reduce`.

        The idea of MPI_Allreduce_init (MPI 4.1, section 6.13): where the arrays are contiguous and stay what they are,
        checks and look-ups need not be repeated. Collective; so is each call. Ranks whose calls come in different
        orders get a MismatchError where memory is shared.
        """
        for name, value in (("array", array), ("out", out)):
            if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
                raise ArgumentError(f"{name}: expected a C-contiguous array for a prepared all-reduce")
        source, target, _ = self._reduction_operands(array, op, out)
        chosen = self._transport_for(source, target)
        size = source.nbytes if nbytes is None else nbytes
        self._settle()
        return partial(
            self._run, "all_reduce", label, size, chosen, chosen.prepare_all_reduce(source, target, op), bucket
        )

    def all_reduce_async(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        label: str = "",
        nbytes: int | None = None,
        bucket: int = -1,
    ) -> Handle:
        """Begin an all-reduce; arguments as for `all_reduce`, the array contiguous.

        Neither array may be touched before `wait()` returns. Ranks may wait for several handles in any order; any
        blocking call completes them all first. In the stats its seconds are those the caller spent in it.
        """
        self._require_open()
        for name, value in (("array", array), ("out", out)):
            if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
                raise ArgumentError(f"{name}: expected a C-contiguous array for a non-blocking all-reduce")
        source, target, _ = self._reduction_operands(array, op, out)
        chosen = self._transport_for(source, target)
        begin = time.perf_counter()
        pending = chosen.start_all_reduce(source, target, op)
        spent_s = time.perf_counter() - begin
        size = source.nbytes if nbytes is None else nbytes
        sequence = self._next_sequence()

        def finished(seconds: float, failed: bool) -> None:
            self._tell(
                Collective("all_reduce", label, size, seconds, chosen.name, sequence, failed, None, bucket, begin)
            )

        return Handle(pending, array if out is None else out, finished, spent_s)

    def broadcast(self, array: np.ndarray, root: int = 0, *, label: str = "", nbytes: int | None = None) -> np.ndarray:
        """Copy root's array into every rank's array of the same shape and dtype, in place, and return it.

        nbytes: the size to count, where part of the array is padding.
        """
        check_root(root, self.size)
        values, finish = writable(array, "array")
        chosen = self._transport_for(values)
        size = values.nbytes if nbytes is None else nbytes
        self._run("broadcast", label, size, chosen, lambda: chosen.broadcast(values, root))
        return finish()

    def all_gather(self, array: np.ndarray, *, label: str = "") -> np.ndarray:
        """Return all ranks' arrays, stacked in rank order: shape (world_size, *array.shape)."""
        source = flat(array, "array")
        out = np.empty((self.size, *array.shape), array.dtype)
        chosen = self._transport_for(source)
        self._run("all_gather", label, out.nbytes, chosen, lambda: chosen.all_gather(source, out.reshape(-1)))
        return out

    def all_gather_in_place(self, array: np.ndarray, *, label: str = "", nbytes: int | None = None) -> np.ndarray:
        """Give every rank all blocks of an array in which rank r has written block r, in place, and return it.

        array: C-contiguous, the same shape and dtype on every rank; the world's size divides its number of elements.
        Where it is one memory on all ranks nothing moves: they only wait for each other. nbytes: the size to count,
        where part of the array is padding.
        """
        if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
            raise ArgumentError("array: expected a C-contiguous array to gather in place")
        values, finish = writable(array, "array")
        if values.size % self.size:
            raise ArgumentError(f"array: expected a number of elements that {self.size} divides, got {values.size}")
        count = values.size // self.size
        block = values[self.rank * count : (self.rank + 1) * count]
        chosen = self._transport_for(values)
        size = values.nbytes if nbytes is None else nbytes
        if self.is_common(values):
            move: Callable[[], None] = chosen.barrier
        elif chosen is self._shared:
            move = partial(chosen.all_gather, block, values)
        else:
            move = partial(chosen.all_gather, block.copy(), values)  # MPI wants source and target apart
        self._run("all_gather", label, size, chosen, move)
        return finish()

    def is_common(self, array: np.ndarray) -> bool:
        """Say whether an array is one memory on all ranks."""
        return self._shared is not None and self.hosts == 1 and self._shared.is_common(array)

    def reduce_scatter(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        label: str = "",
        nbytes: int | None = None,
    ) -> np.ndarray:
        """Reduce blocks over the ranks, in rank order, and return block `rank`.

        array: array.shape[0] is a multiple of the world's size. out: where the block goes, C-contiguous; None makes
        one. nbytes: the size to count, where part of the array is padding.
        """
        check_op(op, array)
        source = flat(array, "array")
        if array.ndim == 0 or array.shape[0] % self.size:
            raise ArgumentError(
                f"array: expected a first dimension that {self.size} ranks divide, got shape {array.shape}"
            )
        shape = (array.shape[0] // self.size, *array.shape[1:])
        if out is None:
            out = np.empty(shape, array.dtype)
        if out.shape != shape or out.dtype != array.dtype or not out.flags.c_contiguous:
            raise ArgumentError(
                f"out: expected a C-contiguous array of shape {shape} and dtype {array.dtype}, "
                f"got {out.shape} and {out.dtype}"
            )
        target, finish = writable(out, "out")
        chosen = self._transport_for(source)
        size = source.nbytes if nbytes is None else nbytes
        self._run("reduce_scatter", label, size, chosen, lambda: chosen.reduce_scatter(source, target, op))
        return finish()

    def reduce_scatter_init(
        self, rows: np.ndarray, op: str = "sum", *, out: np.ndarray, label: str = "", nbytes: int | None = None
    ) -> Callable[[], None]:
        """Return a reduce-scatter of memory that all ranks share, prepared once and called each time it is needed.

        rows: C-contiguous in common memory, (world_size, world_size * n); each rank writes its own row. out: n elements
        that are this rank's, apart from `rows`. A call reduces block `rank` of all rows, in rank order, when all ranks
        have called; it returns as soon as this rank's block is done, so a row may be written again only after the
        collective that comes next. nbytes: the size to count.
        """
        check_op(op, rows)
        if rows.shape != (self.size, self.size * out.size) or rows.dtype != out.dtype or not self.is_common(rows):
            raise ArgumentError(
                f"rows: expected ({self.size}, {self.size * out.size}) of {out.dtype}, common to all ranks, "
                f"got {rows.shape} of {rows.dtype}"
            )
        target, _ = writable(out, "out")
        shared, block = self._transport_for(rows), slice(self.rank * out.size, (self.rank + 1) * out.size)
        reduce = prepared_reduction([row[block] for row in rows], target, op)

        def meet_and_reduce() -> None:
            shared.barrier()
            reduce()

        size = rows[0].nbytes if nbytes is None else nbytes
        return partial(self._run, "reduce_scatter", label, size, shared, meet_and_reduce)

    def gather(self, data: Any, root: int = 0, *, label: str = "") -> list | None:
        """Return the list of all ranks' data on root, None elsewhere.

        Equal arrays travel through MPI's buffers; arrays of different shapes, and other objects, are pickled.
        """
        check_root(root, self.size)
        kinds = self._all_gather_object(kind_of(data))
        if kinds[0] is None or len(set(kinds)) > 1:
            return self.gather_object(data, root, label=label)
        source = flat(data, "data")
        out = np.empty((self.size, *data.shape), data.dtype) if self.rank == root else None
        flat_out = None if out is None else out.reshape(-1)
        chosen = self._transport_for(source)
        self._run("gather", label, source.nbytes * self.size, chosen, lambda: chosen.gather(source, flat_out, root))
        return None if out is None else list(out)

    def scatter(self, data: Any, root: int = 0, *, label: str = "") -> Any:
        """Return item `rank` of root's sequence of world_size items; the others' argument is ignored.

        An array (first dimension: world_size) travels through MPI's buffers; a list is pickled, as its items may
        differ. Every rank raises ArgumentError when root's sequence has another length.
        """
        check_root(root, self.size)
        mine = scatter_header(data, self.size) if self.rank == root else None
        shape, dtype, problem = self._broadcast_object(mine, root)
        if problem:
            raise ArgumentError(f"data: {problem} on rank {root}")
        if shape is None:
            return self._scatter_items(data, root, label)
        out = np.empty(shape[1:], dtype)
        source = flat(data, "data") if self.rank == root else None
        self._run(
            "scatter", label, out.nbytes * self.size, self._base,
            lambda: self._base.scatter(source, out.reshape(-1), root),
        )  # fmt: skip
        return out

    # --- stats and the end ---

    def merged_stats(self) -> CommStats:
        """Return the stats of an average rank, on every rank; collective."""
        return CommStats.merged(self._all_gather_object(self.stats.state()), self.size)

    def add_observer(self, observer: Observer) -> None:
        """Tell an observer about every collective that finishes from now on, and about phases if it wants them."""
        self._observers.append(observer)
        if hasattr(observer, "phase_finished"):
            self._phase_observers.append(observer.phase_finished)

    def remove_observer(self, observer: Observer) -> None:
        """Tell an observer nothing any more; one that was never told is none's loss."""
        self._observers = [other for other in self._observers if other is not observer]
        self._phase_observers = [each.phase_finished for each in self._observers if hasattr(each, "phase_finished")]

    def tell_phase(self, phase: Phase) -> None:
        """Hand a finished part of the program to the observers that have a method `phase_finished`."""
        for finished in self._phase_observers:
            finished(phase)

    def finalize(self) -> None:
        """Free communicators, and shared memory that no array lies in any more; collective, and no call may follow.

        A second `finalize()` does nothing; the stats remain.
        """
        if self._finalized:
            return
        self._settle()
        self._finalized = True
        for transport in (self._shared, self._base):
            if transport is not None:
                transport.close()
        if self.comm is not None:
            self.comm.Free()
        self._shared, self.comm = None, None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.finalize()

    # --- how a collective runs ---

    def _run(
        self, operation: str, label: str, nbytes: int, transport: Transport, move: Callable[[], Any], bucket: int = -1
    ) -> Any:
        self._settle()
        sequence = self._next_sequence()
        failed = True
        begin = time.perf_counter()
        try:
            result = move()
            failed = False
            return result
        finally:
            seconds = time.perf_counter() - begin
            self._tell(
                Collective(operation, label, nbytes, seconds, transport.name, sequence, failed, None, bucket, begin)
            )

    def run_as_all_reduce(self, reduce: Callable[[], None], *, label: str = "", nbytes: int, bucket: int = -1) -> None:
        """Run `reduce` and count all its collectives as one all-reduce of `nbytes`, with what this rank put in as wire.

        For schemes that reduce an array of so many bytes by sending less; bucket: as for `all_reduce`.
        """
        parts: list[Collective] = []
        sequence = self._next_sequence()
        failed, begin = True, time.perf_counter()
        self._parts, outer = parts, self._parts
        try:
            reduce()
            failed = False
        finally:
            self._parts = outer
            seconds = time.perf_counter() - begin
            # nccl-tests count the gathered whole, of which each rank's part is one in world_size.
            wire = sum(p.nbytes // (self.size if "gather" in p.operation else 1) for p in parts)
            names = sorted({part.transport for part in parts}) or [self._base.name]
            transport = "+".join(names)
            self._tell(
                Collective("all_reduce", label, nbytes, seconds, transport, sequence, failed, wire, bucket, begin)
            )

    def _settle(self) -> None:
        """Complete what was started before a blocking call.

        A started all-reduce has a second phase that each rank begins while it waits for it. Were this rank to block
        in another call first, ranks that wait for the all-reduce before that call would wait for this one, and it
        for them.
        """
        self._require_open()
        while self._pending:
            self._pending[0].wait()

    def _require_open(self) -> None:
        if self._finalized:
            raise ArgumentError("Communicator: expected an open one, but finalize() was called; make a new one")

    def _tell(self, event: Collective) -> None:
        if self._parts is not None:
            self._parts.append(event)
            return
        for observer in self._observers:
            observer.collective_finished(event)

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _transport_for(self, *arrays: np.ndarray) -> Transport:
        if self._shared is not None and self._shared.holds(*arrays):
            return self._shared
        return self._base

    def _reduction_operands(
        self, array: np.ndarray, op: str, out: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, Callable[[], np.ndarray]]:
        check_op(op, array)
        if out is None:
            source, finish = writable(array, "array")
            target = source
        else:
            source = flat(array, "array")
            target, finish = writable(out, "out")
            if out.shape != array.shape or out.dtype != array.dtype:
                raise ArgumentError(
                    f"out: expected shape {array.shape} and dtype {array.dtype} as array has, "
                    f"got {out.shape} and {out.dtype}"
                )
            if np.may_share_memory(source, target) and address_of(source) != address_of(target):
                raise ArgumentError("out: expected array itself or memory apart from it, got memory that overlaps it")
        if self._shared is not None and self._shared.is_common(source):
            raise ArgumentError("array: expected memory of this rank, got one that is common to all ranks")
        return source, target, finish
