"""Prepared collectives: objects whose `run` or `start` is called again and again, on memory that stays the same.

They keep their Communicator and their arrays alive: shared memory is freed when no array refers to it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Generic

import numpy as np

from clcomm.base.host.arrays import note_write
from clcomm.comm.collectives.in_flight import Handle, T
from clcomm.comm.collectives.runner import CollectiveRunner
from clcomm.comm.stats.events import Call
from clcomm.comm.transport import Transport
from clcomm.comm.transport.base import PreparedStart


class PreparedCollective(Generic[T]):
    """A blocking collective.

    Args:
        runner: the Communicator's.
        call: what ranks compare.
        move: moves the data.
        written: the memory that changes.
        keeps: what else lives as long as this: the Communicator and the arrays.
    """

    def __init__(self, runner: CollectiveRunner, call: Call, move: Callable[[], T], written: np.ndarray, keeps: object):
        self._runner, self._call, self._move, self._written, self._keeps = runner, call, move, written, keeps

    def run(self) -> T:
        """Do what `CollectiveRunner.run` does, whose lines stand here too as a further call would cost each step."""
        runner = self._runner
        if runner.pending or runner.closed_by or runner.completes_first or runner.unraised is not None:
            runner.complete_in_flight()
        note_write(self._written)
        runner.sequence = sequence = runner.sequence + 1
        return runner.run_numbered(self._call, sequence, perf_counter(), self._move, ())


class PreparedBackgroundCollective:
    """A collective in the background.

    Args:
        runner: the Communicator's.
        call: what ranks compare.
        prepared: the transport's part.
        result: what `wait` of its handles returns.
        written: the memory that changes.
        keeps: what else lives as long as this and its handles: the Communicator and the arrays.
    """

    def __init__(
        self, runner: CollectiveRunner, call: Call, prepared: PreparedStart, result: object, written: np.ndarray,
        keeps: object,
    ):  # fmt: skip
        self._runner, self._call, self._result, self._written, self._keeps = runner, call, result, written, keeps
        self._start = prepared.start

    def start(self, computes: Callable[[], bool] | None = None) -> Handle:
        """Start it and return its handle; computes: returns whether the caller's device is computing."""
        return self._runner.start(
            self._call, self._start, self._result, computes, written=self._written, keeps=self._keeps
        )


class GatherInPlace:
    """An all-gather of the ranks' blocks of an array, each into this array itself.

    Args:
        transport: moves them.
        block: this rank's.
        values: the array.
        copies: whether the transport requires separate source and target, as MPI does.
    """

    def __init__(self, transport: Transport, block: np.ndarray, values: np.ndarray, *, copies: bool):
        self._transport, self._block, self._values, self._copies = transport, block, values, copies

    def run(self) -> None:
        """Gather the blocks that the ranks have written."""
        self._transport.all_gather(self._block.copy() if self._copies else self._block, self._values)


class MeetAndReduce:
    """A reduction of common memory, by `reduce`, once all ranks have written theirs."""

    def __init__(self, transport: Transport, reduce: Callable[[], None]):
        self._meet, self._reduce = transport.barrier, reduce

    def run(self) -> None:
        """Meet the other ranks and reduce."""
        self._meet()
        self._reduce()
