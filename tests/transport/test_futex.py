"""Ranks that outnumber their cores sleep until another rank wakes them; here the ranks are threads."""

from __future__ import annotations

import platform
import threading

import numpy as np
import pytest

from clcomm.comm.transport import futex
from clcomm.comm.transport.futex import Futex

RANKS = 3


class Sleepers:
    """Ranks 0 and 1 wait for rank 2, each in a thread of its own."""

    def __init__(self, progress=lambda: None):
        self.memory = np.zeros(Futex.nbytes(RANKS), np.uint8)
        self.asleep = self.memory[64:].view(np.int64)
        self.counters = np.zeros(RANKS, np.int64)
        self.futexes = [Futex(self.memory, rank, RANKS, lambda: None, progress, True) for rank in range(RANKS)]
        self.failures: list[BaseException] = []
        self.threads = [threading.Thread(target=self._wait, args=(rank,)) for rank in range(2)]
        for thread in self.threads:
            thread.start()

    def _wait(self, rank: int) -> None:
        try:
            self.futexes[rank].wait(self.counters.data, 2, 1)
        except Interrupted as error:
            self.failures.append(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join()


class Interrupted(Exception):
    pass


@pytest.fixture
def long_naps(monkeypatch):
    """Naps that outlast any test, so that only a wake-up ends one."""
    monkeypatch.setattr(futex, "NAP_NS", 3600 * 10**9)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no futex here that Futex knows")
@pytest.mark.usefixtures("long_naps")
def test_a_wake_up_reaches_all_who_sleep():
    sleepers = Sleepers()
    while sleepers.asleep[:2].sum() < 2:
        pass
    sleepers.counters[2] = 1
    sleepers.futexes[2].wake()
    sleepers.join()
    assert sleepers.asleep.tolist() == [0, 0, 0]


@pytest.mark.usefixtures("long_naps")
def test_who_has_come_already_is_not_waited_for():
    sleepers = Sleepers()
    sleepers.counters[2] = 1
    while any(thread.is_alive() for thread in sleepers.threads):
        sleepers.futexes[2].wake()
    assert sleepers.asleep.tolist() == [0, 0, 0]


def test_a_nap_ends_without_a_wake_up():
    sleepers = Sleepers()
    while not sleepers.asleep[:2].any():
        pass
    sleepers.counters[2] = 1
    sleepers.join()
    assert sleepers.asleep.tolist() == [0, 0, 0]


def test_progress_can_end_a_wait():
    def progress() -> None:
        raise Interrupted

    sleepers = Sleepers(progress)
    sleepers.join()
    assert len(sleepers.failures) == 2
    assert sleepers.asleep.tolist() == [0, 0, 0]


def test_ranks_poll_where_the_system_call_is_not_known(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "another")
    looks: list[int] = []
    counters = np.zeros(2, np.int64)
    polled = 3 * futex.POLLS

    def progress() -> None:
        looks.append(1)
        counters[1] = len(looks) * futex.POLLS_BETWEEN_PROGRESS >= polled

    waiting = Futex(np.zeros(Futex.nbytes(2), np.uint8), 0, 2, lambda: None, progress, True)
    waiting.wake()
    waiting.wait(counters.data, 1, 1)
    assert len(looks) == polled // futex.POLLS_BETWEEN_PROGRESS


def test_after_a_yield_that_lasts_waits_sleep_at_once_twice_as_many_each_time(monkeypatch):
    """As where another process computes on this rank's core; then one wait polls again."""
    counters, lasting, yields = np.zeros(2, np.int64), [True, False, True], []
    waiting = Futex(np.zeros(Futex.nbytes(2), np.uint8), 0, 2, lambda: None, lambda: None, False)
    waiting._futex = lambda operation, value: counters.__setitem__(1, counters[1] + 1)  # a sleep ends as rank 1 comes

    def yields_long() -> bool:
        yields.append(int(counters[1]) + 1)
        lasts = lasting.pop(0)
        counters[1] += not lasts  # else the core was away, and the other rank has not come yet
        return lasts

    monkeypatch.setattr(waiting, "_yields_long", yields_long)
    for turn in range(1, 16):
        waiting.wait(counters.data, 1, turn)
        assert counters[1] == turn and not waiting.marks.any()
        if not lasting:
            break
    assert yields == [1, 6, 7], "a wait that sleeps after its yield, 4 that sleep at once, and two that poll"
    for later in range(turn + 1, turn + 9):
        waiting.wait(counters.data, 1, later)
    assert len(yields) == 3, "8 that sleep at once"
