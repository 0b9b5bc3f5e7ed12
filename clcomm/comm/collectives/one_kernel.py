"""An all-reduce in one kernel of each rank: what is left of a collective around it, in as few lines as possible."""

from __future__ import annotations

from time import perf_counter, perf_counter_ns

import numpy as np

from clcomm.base.host.arrays import note_write
from clcomm.comm.collectives.runner import CollectiveRunner
from clcomm.comm.stats.events import Call, Collective
from clcomm.comm.transport.fused import ARRIVED_NS, COMPLETE, LAST_RANK, LATE_NS, STATE, TAG, WAITED_NS, FusedReduction

_new = tuple.__new__  # makes a named tuple of all its fields, in half the time


class OneKernelAllReduce:
    """A prepared all-reduce that one kernel does on each rank, rendezvous included.

    Args:
        runner: the Communicator's; its ranks compare their calls.
        call: what ranks compare.
        reduction: the transport's part, with a kernel to launch.
        written: the memory that changes; None: whoever calls it notes that.
        keeps: what else lives as long as this: the Communicator and the arrays.
    """

    def __init__(
        self, runner: CollectiveRunner, call: Call, reduction: FusedReduction, written: np.ndarray | None = None,
        keeps: object = None,
    ):  # fmt: skip
        assert reduction.launch is not None, "without a kernel"
        self._reduction, self._keeps = reduction, keeps
        self._each_run = (
            runner, runner.notifier, call, call.tag + reduction.kind, reduction.launch, reduction.words,
            call.operation, call.label, call.nbytes, call.transport, call.bucket, call.extent, call.dtype_name,
            written,
        )  # fmt: skip

    def run(self) -> None:
        """Do what `CollectiveRunner.run` does for small arrays, where Python's look-ups and calls outlast the sum.

        One that the kernel cannot complete ends as others do.
        """
        # Reading the attributes one by one takes 40 ns longer.
        (runner, notifier, call, tag, launch, words, operation, label, nbytes, transport, bucket, shape,
         dtype, written) = self._each_run  # fmt: skip
        if runner.pending or runner.closed_by or runner.unraised is not None:
            runner.complete_in_flight()
        if written is not None:
            note_write(written)
        runner.sequence = sequence = runner.sequence + 1
        begin_ns = perf_counter_ns()
        begin = begin_ns * 1e-9
        runner.current = call, sequence, begin
        words[TAG] = tag + sequence
        words[ARRIVED_NS] = begin_ns
        try:
            launch()
        except BaseException:
            runner.fail_unannounced(call, sequence, begin)
            raise
        if words[STATE] != COMPLETE:
            runner.run_numbered(call, sequence, begin, self._reduction.complete, ())
            return
        runner.current = None
        seconds = perf_counter() - begin
        notifier.blocked_s += seconds
        event = _new(Collective, (
            operation, label, nbytes, seconds, transport, sequence, False, None, bucket, begin,
            words[WAITED_NS] * 1e-9, None, words[LAST_RANK], words[LATE_NS] * 1e-9, 0.0, (), (), "", 0, 0, 0, shape,
            dtype,
        ))  # fmt: skip
        for finished in notifier.finished:
            finished(event)
