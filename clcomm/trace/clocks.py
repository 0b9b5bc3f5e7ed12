"""Measures ranks' clocks against rank 0's, at the start and at the end of a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clcomm.communicator import Communicator
from clcomm.transport.clock import ClockOffset, measure_offset


class ClockReading(NamedTuple):
    """Rank 0's clock less this rank's at `at_ns` of this rank's perf_counter_ns(), as used and as measured.

    On rank 0's host both are CLOCK_MONOTONIC: the offset is 0 unless the measurement proves that wrong. On another
    host it is the host's most certain measurement.
    """

    at_ns: int
    offset_ns: int
    uncertainty_ns: int
    measured_ns: int
    measured_uncertainty_ns: int


def read_clock(comm: Communicator) -> ClockReading:
    """Measure this rank's clock against rank 0's; collective."""
    own = measure_offset(comm.comm)
    measured: list[tuple[int, ClockOffset]] = comm.all_gather_object((comm.host, own), label="trace")
    offset = agreed_offset(measured, comm.rank)
    return ClockReading(time.perf_counter_ns(), *offset, *own)


def agreed_offset(measured: Sequence[tuple[int, ClockOffset]], rank: int) -> ClockOffset:
    """Return a rank's offset from all ranks' (host, measurement), rank 0's first."""
    host, own = measured[rank]
    if host == measured[0][0]:
        return own if abs(own.offset_ns) > own.uncertainty_ns else ClockOffset()
    return min((each for where, each in measured if where == host), key=lambda each: each.uncertainty_ns)


def aligned(readings: Sequence[Sequence[Any]]) -> Callable[[int], int]:
    """Return a function from a rank's perf_counter_ns() to rank 0's; drift between the readings is taken as even."""
    first, last = ClockReading(*readings[0]), ClockReading(*readings[-1])
    span, drift = last.at_ns - first.at_ns, last.offset_ns - first.offset_ns
    if not drift or not span:
        return lambda ns: ns + first.offset_ns
    return lambda ns: ns + first.offset_ns + (ns - first.at_ns) * drift // span
