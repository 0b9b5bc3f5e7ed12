"""The log of a caller's stays in all-reduces that go on in the background."""

from __future__ import annotations

from clcomm import visits
from clcomm.visits import Visits


def test_visits_are_cut_to_what_is_asked_for_and_forgotten():
    log = Visits()
    for begin in (0.0, 1.0, 2.0):
        log.add(begin, begin + 0.5)
    assert log.take(1.25, 2.25) == ((1.25, 1.5), (2.0, 2.25))
    assert log.take(0.0, 9.0) == ((2.25, 2.5),)


def test_who_asks_in_a_loop_stays():
    log = Visits()
    for number in range(1000):
        log.add(number * 1e-6, number * 1e-6 + 5e-7)
    assert log.take(0.0, 1.0) == ((0.0, 999 * 1e-6 + 5e-7),)


def test_memory_is_bounded():
    log = Visits()
    for number in range(2 * visits._MOST):
        log.add(number, number + 0.5)
    taken = log.take(0.0, 1e9)
    assert len(taken) == visits._MOST
    assert taken[-1] == (visits._MOST - 1, 2 * visits._MOST - 0.5)
