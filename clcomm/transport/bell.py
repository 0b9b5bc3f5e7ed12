"""How ranks that outnumber their cores wait for each other: after some polls asleep, until another rank rings.

A poll gives the core to the rank that works there; where all ranks of a core wait, polls are only switches from one to
the other, and take the core's time from who comes back to it. A rank that sleeps costs nothing: it waits on a futex
(Linux's system call) in memory that all ranks see. Who sees that what others wait for is there rings, if somebody
sleeps: one system call wakes all. To be woken from another core takes some 20 us, hence the polls first.

Nothing depends on being woken: a sleep ends after NAP_NS in any case, so signals, MPI and what interrupts a wait get
their turn. Where there is no futex, or each rank has a core, ranks only poll.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

#: Polls before a rank goes to sleep: short waits, as between two all-reduces in a row, end within them.
POLLS = 32
#: The longest sleep without a look.
NAP_NS = 2_000_000
#: Polls between two looks at MPI, which may need us to move on what we started earlier.
POLLS_BETWEEN_PROGRESS = 16
#: The number of the system call futex by machine, and two of its operations, on memory of several processes.
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_MOST = (1 << 31) - 1
#: Bytes of the word that ranks sleep on, on a cache line of its own.
_WORD_BYTES = 64


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """Waits for other ranks of a host, and wakes those that wait.

    memory: `nbytes(ranks)` zeroed bytes that are one memory on all ranks. fence: a full memory barrier. progress: lets
    MPI move on, and says whether it has to be called again soon; called now and then. sleeps: whether waiting ranks
    sleep; the same on all ranks.
    """

    def __init__(
        self,
        memory: np.ndarray,
        rank: int,
        ranks: int,
        fence: Callable[[], object],
        progress: Callable[[], object],
        sleeps: bool,
    ):
        self._rank, self._fence, self._progress = rank, fence, progress
        self._word = memory[:4].view(np.int32).data
        self._asleep = memory[_WORD_BYTES : _WORD_BYTES + 8 * ranks].view(np.int64).data
        number = _FUTEX_CALLS.get(platform.machine())
        self._futex: Callable[..., Any] | None = None
        if sleeps and number is not None and os.uname().sysname == "Linux":
            call, address = ctypes.CDLL(None).syscall, ctypes.c_void_p(memory.__array_interface__["data"][0])
            which, nap = ctypes.c_long(number), ctypes.byref(_Timespec(*divmod(NAP_NS, 10**9)))
            self._futex = lambda operation, value: call(which, address, operation, value, nap, None, 0)

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return how much memory the bell of so many ranks needs."""
        return _WORD_BYTES + 8 * ranks

    def ring(self) -> None:
        """Wake the ranks that sleep, after what they wait for was written and a fence."""
        if self._futex is not None and 1 in self._asleep:
            self._word[0] = (self._word[0] + 1) & _MOST
            self._futex(_WAKE, _MOST)

    def wait(self, counters: memoryview, other: int, count: int) -> None:
        """Return when another rank's counter has come as far as `count`."""
        polls = 0
        while counters[other] < count:
            if polls >= POLLS and self._futex is not None and not self._progress():
                self._sleep(counters, other, count)
                continue
            os.sched_yield()
            polls += 1
            if polls % POLLS_BETWEEN_PROGRESS == 0:
                self._progress()

    def _sleep(self, counters: memoryview, other: int, count: int) -> None:
        """Sleep until somebody rings or the nap is over.

        We say that we sleep and then look; the others write and then look who sleeps. With a fence between, one of the
        two sees the other (Dekker's mutual exclusion begins like that), and a word that has changed lets nobody sleep.
        """
        assert self._futex is not None
        seen = self._word[0]
        self._asleep[self._rank] = 1
        try:
            self._fence()
            if counters[other] < count:
                self._futex(_WAIT, seen)
                self._progress()
        finally:
            self._asleep[self._rank] = 0
