"""Clock offsets between processes, from the quickest of several ping-pongs with rank 0.

Cristian's method (F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989): a request sent at
t0 and answered with T at t1 means that T was read between the two, so the clocks differ by T - (t0 + t1) / 2, plus or
minus half of the round trip.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from clcomm.comm.transport.mpi_runtime import Intracomm

#: Tag of the messages.
_TAG = 7
#: Ping-pongs of each rank, of which the quickest counts.
ROUND_TRIPS = 32


class ClockOffset(NamedTuple):
    """Rank 0's perf_counter_ns() minus a rank's own, to within `uncertainty_ns`."""

    offset_ns: int = 0
    uncertainty_ns: int = 0


def measure_offset(comm: Intracomm, round_trips: int = ROUND_TRIPS) -> ClockOffset:
    """Return this rank's clock offset to rank 0; collective.

    Args:
        comm: an mpi4py communicator; None: a world of one.
        round_trips: the number of ping-pongs.
    """
    if comm is None or comm.Get_size() == 1:
        return ClockOffset()
    if comm.Get_rank() > 0:
        return _ask(comm, round_trips)
    for rank in range(1, comm.Get_size()):
        _answer(comm, rank, round_trips)
    return ClockOffset()


def _ask(comm: Intracomm, round_trips: int) -> ClockOffset:
    mine, theirs = np.zeros(1, np.int64), np.zeros(1, np.int64)
    comm.Recv(mine, 0, _TAG)  # rank 0 measures with one rank at a time
    best = None
    for _ in range(round_trips):
        began_ns = time.perf_counter_ns()
        comm.Sendrecv(mine, 0, _TAG, theirs, 0, _TAG)
        ended_ns = time.perf_counter_ns()
        answer = ClockOffset(int(theirs[0]) - (began_ns + ended_ns) // 2, (ended_ns - began_ns + 1) // 2)
        if best is None or answer.uncertainty_ns < best.uncertainty_ns:
            best = answer
    assert best is not None
    return best


def _answer(comm: Intracomm, rank: int, round_trips: int) -> None:
    now, theirs = np.zeros(1, np.int64), np.zeros(1, np.int64)
    comm.Send(now, rank, _TAG)
    for _ in range(round_trips):
        comm.Recv(theirs, rank, _TAG)
        now[0] = time.perf_counter_ns()
        comm.Send(now, rank, _TAG)
