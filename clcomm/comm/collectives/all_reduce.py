"""All-reduce: blocking, prepared for many calls, in the background, or composed of other collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host.arrays import host_array, is_plain, note_write
from clcomm.comm.collectives.arguments import address_of, check_op, flat, writable
from clcomm.comm.collectives.in_flight import Handle
from clcomm.comm.collectives.runner import KEPT_CALLS, CollectiveRunner, Named, refused_on_all
from clcomm.comm.collectives.world import World
from clcomm.comm.stats.comm_stats import Collective, Phase
from clcomm.comm.stats.events import Call
from clcomm.comm.transport.base import Transport
from clcomm.comm.transport.reduction import Fold

if TYPE_CHECKING:
    from clcomm.comm.transport.base import BlockingCollectives
    from clcomm.comm.transport.fused import FusedReduction
    from clcomm.comm.transport.host_memory import MemoryTransport
    from clcomm.comm.transport.mpi_transport import Round, ScheduledAllReduce


class Plans:
    """What the all-reduces of a Communicator keep from call to call.

    Attributes:
        of: what runs a call, by its arguments; valid until memory is allocated.
        scheduled: by algorithm.
        prepared: how many were prepared so far.
        fold_chosen: whether it has been chosen how sums in shared memory are computed.
    """

    def __init__(self) -> None:
        self.of: dict[tuple[object, ...], Callable[[np.ndarray, np.ndarray], object]] = {}
        self.scheduled: dict[str, ScheduledAllReduce] = {}
        self.prepared = 0
        self.fold_chosen = False


class AllReduces:
    """The Communicator's all-reduces (a base class of it)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    world: World
    runner: CollectiveRunner
    plans: Plans

    def fold_with(self, fold: Fold | None) -> None:
        """Reduce in shared memory with `fold` where it supports the arrays, from the next call on; None: with NumPy.

        The Synchronizer sets the device of its latest model: see `clcomm.engine.fold`. The bits are the same, so this
        is not collective, and ranks may differ in it.
        """
        self.plans.fold_chosen = True
        if self.world.shared is not None:
            self.world.shared.fold_with(fold)

    def fold_on_cpu(self) -> None:
        """Reduce in shared memory with this rank's CPU device where there is one, unless `fold_with` has chosen.

        Preparing an all-reduce calls it, and many of one kind do: one that runs once is done before a device is open.
        """
        if self.world.shared is not None:
            choose_fold(self.plans, self.world.shared, self.local_rank, self.local_size, self.world.cores)

    @property
    def sums(self) -> str:
        """What sums float32 in shared memory on this rank: "device", or "numpy" without `fold_with`."""
        return "numpy" if self.world.shared is None or self.world.shared.fold is None else "device"

    @refused_on_all
    def all_reduce(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        label: str = "",
        nbytes: int | None = None,
        bucket: int = -1,
        compared: str | None = None,
        algorithm: str | None = None,
    ) -> np.ndarray:
        """Reduce an array over the ranks and return the result, the same bits on every rank.

        The order of operands is that of the ranks; with several ranks on several hosts "auto" reduces within each host
        first, then in the order of the hosts' lowest ranks.

        Args:
            array: any shape and numeric dtype, the same on every rank; a NumPy scalar gives a new array. Like all
                arrays of the collectives, those in lists of `all_to_all` aside, it may be another library's in the
                host's memory: whatever has `__dlpack__`, which is read and written without a copy.
            op: "sum", "mean" (floating dtypes), "min", "max" or "prod"; for integers and booleans also MPI's "land",
                "lor", "lxor", "band", "bor" and "bxor"; or mpi4py's constant, such as MPI.SUM.
            out: receives the result, of the same shape and dtype; None: reduce in place.
            label: the name under which it is counted.
            nbytes: the size to count, where part of the array is padding.
            bucket: index of the gradients' bucket, for observers.
            compared: what ranks compare, with nbytes, in place of label and bucket, which may then differ; None: these.
            algorithm: "ring", "halving", "tree" or "direct": send the messages of that algorithm from rank to rank, to
                study it (docs/algorithms.md). The order of operands is then the algorithm's.
        """
        into = array if out is None else out
        key = self._key_of(array, into, op, label, nbytes, bucket, compared, algorithm)
        planned = None if key is None else self.plans.of.get(key)
        if planned is None:
            if out is None and isinstance(array, np.generic):
                array = into = np.array(array)
            array, out = _arrays(array, out)
            source, target, finish, op = self._reduction_operands(array, op, out)
            chosen = self.world.blocking_for(source, target) if algorithm is None else self._scheduled(algorithm)
            call = self._call_of(chosen, array, source, target, op, label, nbytes, bucket, compared=compared)
            if key is not None:
                if len(self.plans.of) >= KEPT_CALLS:
                    self.plans.of.clear()
                self.plans.of[key] = self._planned(call, chosen, source, op)
            self.runner.run(call, chosen.all_reduce, source, target, op)
            finish()
            return into
        note_write(into)
        planned(array.reshape(-1), into.reshape(-1))
        return into

    def _scheduled(self, algorithm: str) -> ScheduledAllReduce:
        self.runner.require_open()
        found = self.plans.scheduled.get(algorithm)
        if found is None:
            from clcomm.base.schedules import schedule_of
            from clcomm.comm.transport.mpi_transport import ScheduledAllReduce

            finished = partial(_round_finished, self.runner, algorithm)
            schedule = schedule_of(algorithm, self.size)
            found = ScheduledAllReduce(self.world.comm, self.rank, schedule, finished)
            self.plans.scheduled[algorithm] = found
        return found

    @refused_on_all
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
        """Return a prepared all-reduce, to be called repeatedly; arguments as for `all_reduce`.

        Like MPI_Allreduce_init (MPI 4.1, section 6.13): arrays are contiguous and fixed, so that checks and look-ups
        are not repeated. Preparing is collective, and so is each call. Calls in different orders on different ranks
        raise MismatchError where memory is shared.
        """
        array, out = _arrays(array, out)
        source, target, number, op = self._prepare(array, op, out, "prepared")
        chosen = self.world.blocking_for(source, target)
        call = self._call_of(chosen, array, source, target, op, label, nbytes, bucket, number)
        prepared = self.runner.prepare(call, chosen.prepare_all_reduce, source, target, op)
        keeps = self, source
        if not (hasattr(prepared, "launch") and self.runner.checked):
            return self.runner.repeatable(call, prepared, target, keeps=keeps)
        from clcomm.comm.collectives.one_kernel import OneKernelAllReduce  # here, as most programs' modules need none

        return OneKernelAllReduce(self.runner, call, cast("FusedReduction", prepared), target, keeps).run

    @refused_on_all
    def all_reduce_async(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        label: str = "",
        nbytes: int | None = None,
        bucket: int = -1,
        compared: str | None = None,
    ) -> Handle:
        """Start an all-reduce in the background; arguments as for `all_reduce`, the array contiguous.

        Neither array may be accessed before `wait()` returns. Ranks may wait for several handles in any order, also for
        those of other Communicators; a blocking call of this one completes its own first. The stats count its seconds
        from the end of the one started before it until this rank sees its own end; exposed are those that the caller
        spends in this call and in `wait()` and `done()` of any of this Communicator's handles.
        """
        result = array if out is None else out
        array, out = _arrays(array, out)
        source, target, op = self._contiguous_operands(array, op, out, "non-blocking")
        chosen = self.world.transport_for(source, target)
        call = self._call_of(chosen, array, source, target, op, label, nbytes, bucket, compared=compared)
        start = partial(chosen.start_all_reduce, source, target, op)
        return self.runner.start(call, start, result, written=target, keeps=self)

    @refused_on_all
    def all_reduce_async_init(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        label: str = "",
        nbytes: int | None = None,
        bucket: int = -1,
    ) -> Callable[..., Handle]:
        """Return a prepared all-reduce that each call starts in the background; arguments as for `all_reduce`.

        Like MPI_Start on a prepared collective (MPI 4.1, section 6.13). Collective; ranks start prepared all-reduces in
        the same order, and wait for one before they start it again. The returned function takes an optional function
        that returns whether the caller's device is computing; the caller's time in calls then counts as hidden.
        """
        result = array if out is None else out
        array, out = _arrays(array, out)
        source, target, number, op = self._prepare(array, op, out, "non-blocking")
        chosen = self.world.transport_for(source, target)
        call = self._call_of(chosen, array, source, target, op, label, nbytes, bucket, number)
        prepared = self.runner.prepare(call, chosen.prepare_start, source, target, op)
        return partial(self.runner.start, call, prepared, result, written=target, keeps=(self, source))

    def _prepare(
        self, array: np.ndarray, op: str, out: np.ndarray | None, kind: str
    ) -> tuple[np.ndarray, np.ndarray, int, str]:
        """Return source, target, number and reduction of an all-reduce to prepare."""
        source, target, op = self._contiguous_operands(array, op, out, kind)
        self.runner.complete_in_flight()
        self.fold_on_cpu()
        self.plans.prepared += 1
        return source, target, self.plans.prepared, op

    def _contiguous_operands(
        self, array: np.ndarray, op: str, out: np.ndarray | None, kind: str
    ) -> tuple[np.ndarray, np.ndarray, str]:
        self.runner.require_open()
        for name, value in (("array", array), ("out", out)):
            if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
                raise ArgumentError(f"{name}: expected a C-contiguous array for a {kind} all-reduce")
        source, target, _, op = self._reduction_operands(array, op, out)
        return source, target, op

    def reduces_within_hosts(self, array: np.ndarray, out: np.ndarray) -> bool:
        """Return whether an all-reduce of `array` to `out` reduces within each host before hosts exchange data."""
        from clcomm.comm.transport.hierarchical import HierarchicalTransport

        shared = self.world.shared
        return isinstance(shared, HierarchicalTransport) and shared.holds(array) and shared.is_common(out)

    @refused_on_all
    def all_reduce_between_hosts_init(
        self, array: np.ndarray, out: np.ndarray, between: Callable[[Transport], int], *, label: str = ""
    ) -> Callable[[], int]:
        """Return a prepared all-reduce in which `between` reduces between hosts: for compression.

        Collective; so is each call, which returns the result of `between`.

        Args:
            array: the operand, contiguous.
            out: receives the result, contiguous; `reduces_within_hosts(array, out)` is True.
            between: see HierarchicalTransport.prepare_between_hosts.
            label: the name under which it is counted.
        """
        from clcomm.comm.transport.hierarchical import HierarchicalTransport

        source, target, number, _ = self._prepare(array, "sum", out, "prepared")
        chosen = self.world.transport_for(source, target)
        assert isinstance(chosen, HierarchicalTransport)
        call = self._call_of(chosen, array, source, target, "sum", label, None, -1, number)
        prepared = self.runner.prepare(call, chosen.prepare_between_hosts, source, target, between)
        return self.runner.repeatable(call, prepared, target, keeps=(self, source))

    def run_as_all_reduce(
        self, reduce: Callable[[], int | None], *, label: str = "", nbytes: int, bucket: int = -1
    ) -> None:
        """Run `reduce` and count all its collectives as one all-reduce of `nbytes`, for compression.

        The bytes that this rank sent count as `wire_nbytes`, unless `reduce` returns another number.
        """
        runner, notifier = self.runner, self.runner.notifier
        runner.complete_in_flight()
        parts: list[Collective] = []
        runner.sequence = sequence = runner.sequence + 1
        failed, wire = True, None
        begin, before_s = time.perf_counter(), notifier.communicated()
        outer, notifier.finished = notifier.finished, [parts.append]
        try:
            wire = reduce()
            if runner.pending:
                runner.complete_in_flight()  # what `reduce` started is part of it
            failed = False
        finally:
            notifier.finished = outer
            seconds = time.perf_counter() - begin
            notifier.blocked_s += seconds - (notifier.communicated() - before_s)  # without the parts, counted already
            # nccl-tests count the gathered whole, of which a rank sends one world_size-th.
            if wire is None:
                wire = sum(p.nbytes // (self.size if "gather" in p.operation else 1) for p in parts)
            transport = "+".join(sorted({part.transport for part in parts}) or [self.world.base.name])
            event = Collective(
                "all_reduce", label, nbytes, seconds, transport, sequence, failed, wire, bucket, begin,
                None if any(part.wait_s is None for part in parts) else sum(part.wait_s or 0.0 for part in parts),
                messages=sum(part.messages for part in parts),
                message_nbytes=sum(part.message_nbytes for part in parts),
            )  # fmt: skip
            if parts:
                event = event._replace(last_rank=parts[0].last_rank, late_s=parts[0].late_s)
            notifier.notify(event)

    # --- plans, kept for equal arguments ---

    def _key_of(self, array: np.ndarray, into: np.ndarray, op: str, *others: object) -> tuple[object, ...] | None:
        """Return a key for the arguments; None where they are invalid or need copies."""
        if (
            is_plain(array)
            and is_plain(into)
            and isinstance(op, str)
            and array.flags.c_contiguous
            and into.flags.carray
            and array.shape == into.shape
            and array.dtype == into.dtype
        ):
            address = self.world.address
            return address(array), address(into), array.shape, array.dtype, op, *others
        return None

    def _planned(
        self, call: Call, chosen: BlockingCollectives | ScheduledAllReduce, source: np.ndarray, op: str
    ) -> Callable[[np.ndarray, np.ndarray], object]:
        """Return what runs this call on flat arrays."""
        runner, staged = self.runner, self.world.staged
        kernel = staged.kernel_for(source, op) if staged is not None and chosen is staged and runner.checked else None
        if kernel is not None:
            from clcomm.comm.collectives.one_kernel import OneKernelAllReduce  # here, as most programs' need none

            run = OneKernelAllReduce(runner, call, kernel).run

            def reduce(source: np.ndarray, out: np.ndarray) -> None:
                kernel.arrays = source, out
                run()
                kernel.arrays = ()

            return reduce
        return lambda source, out: runner.run(call, chosen.all_reduce, source, out, op)

    def _call_of(
        self,
        chosen: Named,
        array: np.ndarray,
        source: np.ndarray,
        target: np.ndarray,
        op: str,
        label: str,
        nbytes: int | None,
        bucket: int,
        prepared: int = 0,
        compared: str | None = None,
    ) -> Call:
        is_aligned = source.flags.aligned and target.flags.aligned
        return self.runner.call(
            "all_reduce", chosen, label, array=array, nbytes=nbytes, op=op, bucket=bucket, prepared=prepared,
            compared=compared, is_aligned=is_aligned,
        )  # fmt: skip

    def _reduction_operands(
        self, array: np.ndarray, op: str, out: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, Callable[[], np.ndarray], str]:
        op = check_op(op, array)
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
                raise ArgumentError("out: expected array itself or separate memory, got memory that overlaps it")
        if self.world.is_common(source):
            raise ArgumentError("array: expected memory of this rank, got memory that is common to all ranks")
        return source, target, finish, op


def _arrays(array: np.ndarray, out: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    return host_array(array, "array"), None if out is None else host_array(out, "out")


def choose_fold(plans: Plans, shared: MemoryTransport, local_rank: int, local_size: int, cores: int) -> None:
    """Do what `AllReduces.fold_on_cpu` does, without a Communicator; what is planned is planned anew."""
    plans.of.clear()
    if not plans.fold_chosen:
        from clcomm.engine.fold import fold_of_rank  # here alone does communication know the engine

        plans.fold_chosen = True
        shared.fold_with(fold_of_rank(local_rank, local_size, cores))


def _round_finished(runner: CollectiveRunner, algorithm: str, done: Round) -> None:
    runner.count_sent(done.messages, done.nbytes)
    if done.messages:
        runner.notifier.notify_phase(
            Phase("round", done.began_s, done.seconds, algorithm, -1, done.seconds, (("round", done.number),))
        )
