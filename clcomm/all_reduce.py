"""All-reduce: at once, prepared for many calls, in the background, or made of other collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from clcomm.arguments import address_of, check_op, flat, writable
from clcomm.errors import ArgumentError
from clcomm.handle import Handle
from clcomm.running import CollectiveRunner
from clcomm.stats import Collective


class AllReduces(CollectiveRunner):
    """The part of the Communicator, which inherits it, that reduces whole arrays."""

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
