"""All-reduce: blocking, prepared for many calls, in the background, or composed of other collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from clcomm.collectives.arguments import address_of, check_op, flat, writable
from clcomm.collectives.handle import Handle, T
from clcomm.collectives.runner import KEPT_CALLS, CollectiveRunner
from clcomm.collectives.world import World
from clcomm.errors import ArgumentError, RankNames
from clcomm.stats.call import Call
from clcomm.stats.comm_stats import Collective, Observer, Phase
from clcomm.transport import Transport
from clcomm.transport.reduction import Fold

if TYPE_CHECKING:
    from clcomm.transport.scheduled import Round, ScheduledAllReduce


class AllReduces(CollectiveRunner):
    """The Communicator's all-reduces (a base class of it)."""

    def __init__(self, world: World, observers: Iterable[Observer], name_ranks: RankNames):
        super().__init__(world, observers, name_ranks)
        self._prepared = 0  # all-reduces prepared so far
        self._scheduled: dict[str, ScheduledAllReduce] = {}  # by algorithm
        self._planned: dict[tuple[object, ...], tuple[Call, Transport]] = {}  # valid until memory is allocated

    def fold_with(self, fold: Fold | None) -> None:
        """Reduce in shared memory with `fold` where it supports the arrays, from the next call on; None: with NumPy.

        The Synchronizer sets the device of its latest model: see `clcomm.engine.fold`. The bits are the same, so this
        is not collective, and ranks may differ in it.
        """
        if self._shared is not None:
            self._shared.fold_with(fold)

    @property
    def sums(self) -> str:
        """What sums float32 in shared memory on this rank: "device", or "numpy" without `fold_with`."""
        return "numpy" if self._shared is None or self._shared.fold is None else "device"

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
            array: any shape and numeric dtype, the same on every rank.
            op: "sum", "mean" (floating dtypes), "min", "max" or "prod"; for integers and booleans also MPI's "land",
                "lor", "lxor", "band", "bor" and "bxor".
            out: receives the result, of the same shape and dtype; None: reduce in place.
            label: the name under which it is counted.
            nbytes: the size to count, where part of the array is padding.
            bucket: index of the gradients' bucket, for observers.
            compared: what ranks compare, with nbytes, in place of label and bucket, which may then differ; None: these.
            algorithm: "ring", "halving", "tree" or "direct": send the messages of that algorithm from rank to rank, to
                study it (docs/algorithms.md). The order of operands is then the algorithm's.
        """
        if algorithm is not None:
            return self._all_reduce_by(algorithm, array, op, out, label, nbytes, bucket)
        into = array if out is None else out
        key = self._key_of(array, into, op, label, nbytes, bucket, compared)
        planned = None if key is None else self._planned.get(key)
        if planned is None:
            source, target, finish = self._reduction_operands(array, op, out)
            call, chosen = self._plan(array, source, target, op, label, nbytes, bucket, compared=compared)
            if key is not None:
                if len(self._planned) >= KEPT_CALLS:
                    self._planned.clear()
                self._planned[key] = call, chosen
            self._run_counted(call, chosen.all_reduce, source, target, op)
            return finish()
        call, chosen = planned
        self._run_counted(call, chosen.all_reduce, array.reshape(-1), into.reshape(-1), op)
        return into

    def _all_reduce_by(
        self, algorithm: str, array: np.ndarray, op: str, out: np.ndarray | None, label: str, nbytes: int | None,
        bucket: int,
    ) -> np.ndarray:  # fmt: skip
        self._require_open()
        scheduled = self._scheduled.get(algorithm)
        if scheduled is None:
            from clcomm.schedules import schedule_of
            from clcomm.transport.scheduled import ScheduledAllReduce

            schedule = schedule_of(algorithm, self.size)
            scheduled = ScheduledAllReduce(self.comm, self.rank, schedule, partial(self._round_finished, algorithm))
            self._scheduled[algorithm] = scheduled
        source, target, finish = self._reduction_operands(array, op, out)
        call = self._call(
            "all_reduce", scheduled, label, array=array, nbytes=nbytes, op=op, bucket=bucket,
            is_aligned=source.flags.aligned and target.flags.aligned,
        )  # fmt: skip
        self._run_counted(call, scheduled.all_reduce, source, target, op)
        return finish()

    def _round_finished(self, algorithm: str, done: Round) -> None:
        messages, nbytes = self._sent
        self._sent = messages + done.messages, nbytes + done.nbytes
        if done.messages:
            self.notify_phase(
                Phase("round", done.began_s, done.seconds, algorithm, -1, done.seconds, (("round", done.number),))
            )

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
        source, target = self._contiguous_operands(array, op, out, "prepared")
        self._complete_in_flight()
        self._prepared += 1
        call, chosen = self._plan(array, source, target, op, label, nbytes, bucket, self._prepared)
        prepare = partial(chosen.prepare_all_reduce, source, target, op)
        move = self._compare_and_move(call, self._sequence, time.perf_counter(), prepare, ())
        return _with_references(self._repeatable(call, move), source, target)

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
        source, target = self._contiguous_operands(array, op, out, "non-blocking")
        call, chosen = self._plan(array, source, target, op, label, nbytes, bucket, compared=compared)
        result = array if out is None else out
        return self._start(call, partial(chosen.start_all_reduce, source, target, op), result)

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
        source, target = self._contiguous_operands(array, op, out, "non-blocking")
        self._complete_in_flight()
        self._prepared += 1
        call, chosen = self._plan(array, source, target, op, label, nbytes, bucket, self._prepared)
        prepare = partial(chosen.prepare_start, source, target, op)
        start = self._compare_and_move(call, self._sequence, time.perf_counter(), prepare, ())
        return _with_references(partial(self._start, call, start, array if out is None else out), source, target)

    def _contiguous_operands(
        self, array: np.ndarray, op: str, out: np.ndarray | None, kind: str
    ) -> tuple[np.ndarray, np.ndarray]:
        self._require_open()
        for name, value in (("array", array), ("out", out)):
            if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
                raise ArgumentError(f"{name}: expected a C-contiguous array for a {kind} all-reduce")
        return self._reduction_operands(array, op, out)[:2]

    def reduces_within_hosts(self, array: np.ndarray, out: np.ndarray) -> bool:
        """Return whether an all-reduce of `array` to `out` reduces within each host before hosts exchange data."""
        from clcomm.transport.hierarchical import HierarchicalTransport

        shared = self._shared
        return isinstance(shared, HierarchicalTransport) and shared.holds(array) and shared.is_common(out)

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
        from clcomm.transport.hierarchical import HierarchicalTransport

        source, target = self._contiguous_operands(array, "sum", out, "prepared")
        self._complete_in_flight()
        self._prepared += 1
        call, chosen = self._plan(array, source, target, "sum", label, None, -1, self._prepared)
        assert isinstance(chosen, HierarchicalTransport)
        prepare = partial(chosen.prepare_between_hosts, source, target, between)
        run = partial(
            self._run_counted, call, self._compare_and_move(call, self._sequence, time.perf_counter(), prepare, ())
        )
        return _with_references(run, source, target)

    def run_as_all_reduce(
        self, reduce: Callable[[], int | None], *, label: str = "", nbytes: int, bucket: int = -1
    ) -> None:
        """Run `reduce` and count all its collectives as one all-reduce of `nbytes`, for compression.

        The bytes that this rank sent count as `wire_nbytes`, unless `reduce` returns another number.
        """
        self._complete_in_flight()
        parts: list[Collective] = []
        self._sequence = sequence = self._sequence + 1
        failed, wire = True, None
        begin, before_s = time.perf_counter(), self.communicated()
        outer, self._finished = self._finished, [parts.append]
        try:
            wire = reduce()
            if self._pending:
                self._complete_in_flight()  # what `reduce` started is part of it
            failed = False
        finally:
            self._finished = outer
            seconds = time.perf_counter() - begin
            self._blocked_s += seconds - (self.communicated() - before_s)  # without the parts, counted already
            # nccl-tests count the gathered whole, of which a rank sends one world_size-th.
            if wire is None:
                wire = sum(p.nbytes // (self.size if "gather" in p.operation else 1) for p in parts)
            transport = "+".join(sorted({part.transport for part in parts}) or [self._base.name])
            event = Collective(
                "all_reduce", label, nbytes, seconds, transport, sequence, failed, wire, bucket, begin,
                None if any(part.wait_s is None for part in parts) else sum(part.wait_s or 0.0 for part in parts),
                messages=sum(part.messages for part in parts),
                message_nbytes=sum(part.message_nbytes for part in parts),
            )  # fmt: skip
            if parts:
                event = event._replace(last_rank=parts[0].last_rank, late_s=parts[0].late_s)
            self._notify(event)

    # --- plans, kept for equal arguments ---

    def _key_of(self, array: np.ndarray, into: np.ndarray, op: str, *others: object) -> tuple[object, ...] | None:
        """Return a key for the arguments; None where they are invalid or need copies."""
        if (
            isinstance(array, np.ndarray)
            and isinstance(into, np.ndarray)
            and isinstance(op, str)
            and array.flags.c_contiguous
            and into.flags.carray
            and array.shape == into.shape
            and array.dtype == into.dtype
        ):
            return self._address(array), self._address(into), array.shape, array.dtype, op, *others
        return None

    def _plan(
        self,
        array: np.ndarray,
        source: np.ndarray,
        target: np.ndarray,
        op: str,
        label: str,
        nbytes: int | None,
        bucket: int,
        prepared: int = 0,
        compared: str | None = None,
    ) -> tuple[Call, Transport]:
        chosen, is_aligned = self._transport_for(source, target), source.flags.aligned and target.flags.aligned
        call = self._call(
            "all_reduce", chosen, label, array=array, nbytes=nbytes, op=op, bucket=bucket, prepared=prepared,
            compared=compared, is_aligned=is_aligned,
        )  # fmt: skip
        return call, chosen

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
                raise ArgumentError("out: expected array itself or separate memory, got memory that overlaps it")
        if self._shared is not None and self._shared.is_common(source):
            raise ArgumentError("array: expected memory of this rank, got memory that is common to all ranks")
        return source, target, finish


def _with_references(prepared: Callable[..., T], *arrays: np.ndarray) -> Callable[..., T]:
    """Keep references to a prepared call's arrays: shared memory is freed when no array refers to it."""
    prepared.arrays = arrays  # type: ignore[attr-defined]
    return prepared
