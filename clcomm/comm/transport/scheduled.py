"""An all-reduce that sends the messages of a schedule from rank to rank, one round after another."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np

from clcomm.base.schedules import Schedule, Transfer
from clcomm.comm.transport.mpi_messages import Message, Messages
from clcomm.comm.transport.mpi_runtime import Intracomm
from clcomm.comm.transport.pending import advance_started
from clcomm.comm.transport.reduction import partial_op, reduce_in_rank_order

_TAG = 12


class Round(NamedTuple):
    """A finished round: its number from 1 up, its begin by time.perf_counter(), and what this rank sent in it."""

    number: int
    began_s: float
    seconds: float
    messages: int
    nbytes: int


class ScheduledAllReduce:
    """All-reduces by a schedule, through MPI's messages, on any ranks of one Communicator.

    Results have the same bits on every rank, but not those of the transports: the order of the sum is the schedule's.

    Args:
        comm: the mpi4py communicator, still owned by the caller; None in a world of one.
        rank: this rank.
        schedule: who sends what when.
        finished: called after each round.

    Attributes:
        name: the algorithm's.
    """

    def __init__(self, comm: Intracomm, rank: int, schedule: Schedule, finished: Callable[[Round], None]):
        self.name, self._schedule, self._rank = schedule.name, schedule, rank
        self._messages = None if comm is None else Messages(comm)
        self._finished = finished

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        """Reduce `source` over the ranks into `out` on every rank; they may be the same array."""
        work = source.copy()  # `out` may be common to all ranks: it gets final values only
        for number, transfers in enumerate(self._schedule.rounds, 1):
            began_s = perf_counter()
            sent = self._exchange(work, transfers, partial_op(op))
            self._finished(Round(number, began_s, perf_counter() - began_s, len(sent), sum(sent)))
        reduce_in_rank_order([work], work, op, self._schedule.ranks)
        np.copyto(out, work)

    def _exchange(self, work: np.ndarray, transfers: tuple[Transfer, ...], op: str) -> list[int]:
        """Send and receive this rank's messages of a round; return the bytes of each that it sent."""
        bounds, messages = self._schedule.bounds(work.size), self._messages
        assert messages is not None  # a world of one has no rounds
        started: list[Message] = []
        received: list[tuple[Transfer, np.ndarray]] = []
        for each in transfers:
            if each.receiver == self._rank:
                received.append((each, np.empty(bounds[each.last] - bounds[each.first], work.dtype)))
                started.append(messages.receive(received[-1][1], each.sender, _TAG))
        sent = [work[bounds[each.first] : bounds[each.last]] for each in transfers if each.sender == self._rank]
        receivers = [each.receiver for each in transfers if each.sender == self._rank]
        started += [messages.send(part, to, _TAG) for part, to in zip(sent, receivers, strict=True)]
        while started := [each for each in started if not each.done()]:
            advance_started()
            os.sched_yield()
        if received:
            first = received[0][0]
            own = work[bounds[first.first] : bounds[first.last]]
            rows = {each.sender: values for each, values in received}
            if first.adds:
                rows[self._rank] = own.copy()
            reduce_in_rank_order([rows[rank] for rank in sorted(rows)], own, op, 1)
        return [part.nbytes for part in sent]
