"""Measurement of each rank's clock against rank 0's, at the start and at the end of a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from clcomm.comm.communicator import Communicator
from clcomm.comm.transport.clock import ClockOffset, measure_offset


class ClockReading(NamedTuple):
    """The offset of this rank's clock, rank 0's time minus its own, as used and as measured.

    Ranks on rank 0's host read the same clock, CLOCK_MONOTONIC: their offset is 0 unless the measurement proves that
    wrong. Ranks on another host use the most certain measurement of that host.

    Attributes:
        at_ns: this rank's perf_counter_ns() at the measurement.
        offset_ns: the offset as used.
        uncertainty_ns: its largest error.
        measured_ns: the offset as this rank measured it.
        measured_uncertainty_ns: the largest error of that measurement.
    """

    at_ns: int
    offset_ns: int
    uncertainty_ns: int
    measured_ns: int
    measured_uncertainty_ns: int


def read_clock(comm: Communicator) -> ClockReading:
    own = measure_offset(comm.comm)
    measured: list[tuple[int, ClockOffset]] = comm.all_gather_object((comm.host, own), label="trace")
    offset = agreed_offset(measured, comm.rank)
    return ClockReading(time.perf_counter_ns(), *offset, *own)


def agreed_offset(measured: Sequence[tuple[int, ClockOffset]], rank: int) -> ClockOffset:
    """Return the offset for a rank; `measured` has the (host, measurement) of every rank, by rank."""
    host, own = measured[rank]
    if host == measured[0][0]:
        return own if abs(own.offset_ns) > own.uncertainty_ns else ClockOffset()
    return min((each for where, each in measured if where == host), key=lambda each: each.uncertainty_ns)


def aligned(readings: Sequence[Sequence[int]]) -> Callable[[int], int]:
    """Return a function from a rank's perf_counter_ns() to rank 0's; drift is taken as linear between the readings.

    `readings` are ClockReadings, or rows of their values.
    """
    first, last = ClockReading(*readings[0]), ClockReading(*readings[-1])
    span, drift = last.at_ns - first.at_ns, last.offset_ns - first.offset_ns
    if not drift or not span:
        return lambda ns: ns + first.offset_ns
    return lambda ns: ns + first.offset_ns + (ns - first.at_ns) * drift // span
