"""The log of a caller's calls of all-reduces in the background."""

from __future__ import annotations

from clcomm.comm.collectives import in_flight
from clcomm.comm.collectives.in_flight import ExposedTime


def test_spans_are_cut_to_the_requested_times_and_dropped():
    log = ExposedTime()
    for begin in (0.0, 1.0, 2.0):
        log.add(begin, begin + 0.5)
    assert log.take(1.25, 2.25) == ((1.25, 1.5), (2.0, 2.25))
    assert log.take(0.0, 9.0) == ((2.25, 2.5),)


def test_polling_in_a_loop_counts_as_one_call():
    log = ExposedTime()
    for number in range(1000):
        log.add(number * 1e-6, number * 1e-6 + 5e-7)
    assert log.take(0.0, 1.0) == ((0.0, 999 * 1e-6 + 5e-7),)


def test_memory_is_bounded():
    log = ExposedTime()
    for number in range(2 * in_flight._MOST):
        log.add(number, number + 0.5)
    taken = log.take(0.0, 1e9)
    assert len(taken) == in_flight._MOST
    assert taken[-1] == (in_flight._MOST - 1, 2 * in_flight._MOST - 0.5)
