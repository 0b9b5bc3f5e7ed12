"""The wait of ranks that outnumber their cores: some polls, then sleep on a futex until another rank wakes them.

A poll yields the core to a rank that computes there. Where all ranks of a core wait, polls are only context switches,
and delay the next rank that has work. A sleeping rank costs nothing: it waits on a futex (Linux's system call) in
shared memory. The last rank to arrive wakes the others if one sleeps: one system call wakes all. A wake-up from
another core takes some 20 us, so ranks poll first.

A thread beside the program's own always sleeps: its polls would take core and interpreter from the computing thread.

A rank with a core of its own polls. Where a process that computes shares that core, a yield costs a slice of the
scheduler's time (4 ms), however soon the other rank comes, while a rank that sleeps gets the core back when it is
woken. So after a yield that lasted, the next waits sleep at once, twice as many each time; then one polls again.

Correctness does not depend on wake-ups: a sleep ends after NAP_NS in any case, so that signals and MPI are handled.
Without a futex, or with a core for each rank, ranks only poll.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from time import perf_counter_ns

import numpy as np

#: Polls before a rank goes to sleep: short waits, as between two all-reduces in a row, end within them.
POLLS = 32
#: A yield that takes so long has given the core to a process that computes; the most waits that then sleep at once.
_LOST_NS, _MOST_SLEEPS = 500_000, 256
#: The longest sleep between two checks.
NAP_NS = 2_000_000
#: Polls between two calls into MPI, which may need them to advance earlier operations.
POLLS_BETWEEN_PROGRESS = 16
#: The number of the futex system call by machine, and two of its operations on memory shared by processes.
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_INT32_MAX = (1 << 31) - 1
#: Bytes of the word that ranks sleep on, on a cache line of its own.
_WORD_BYTES = 64


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Waits for other ranks of a host, and wakes waiting ranks.

    Args:
        memory: `nbytes(ranks)` zeroed bytes, shared by all ranks.
        rank: this rank's number on the host.
        ranks: the number of ranks.
        fence: a full memory barrier.
        progress: advances MPI, and returns whether it has to be called again soon.
        sleeps: whether this thread sleeps when it waits; other threads do in any case.
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
        self._sleeps, self._program = sleeps, threading.get_ident()
        self._wakes = 0
        self._sleeps_left, self._sleeps_after_loss = 0, 2  # waits that sleep at once: still, and after a lasting yield
        self._word = memory[:4].view(np.int32).data
        #: For each rank whether it sleeps: 1 or 0.
        self.marks = memory[_WORD_BYTES : _WORD_BYTES + 8 * ranks].view(np.int64)
        self._asleep = self.marks.data
        number = _FUTEX_CALLS.get(platform.machine())
        self._futex: Callable[..., int] | None = None
        if number is not None and os.uname().sysname == "Linux":
            call, address = ctypes.CDLL(None).syscall, ctypes.c_void_p(memory.__array_interface__["data"][0])
            which, nap = ctypes.c_long(number), ctypes.byref(_Timespec(*divmod(NAP_NS, 10**9)))
            self._futex = lambda operation, value: call(which, address, operation, value, nap, None, 0)

    @property
    def is_program_thread(self) -> bool:
        """Whether the calling thread is the program's own, which made the object."""
        return threading.get_ident() == self._program

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the number of bytes that the futex of `ranks` ranks needs."""
        return _WORD_BYTES + 8 * ranks

    def wake(self) -> None:
        """Wake the sleeping ranks; call it after the write that they wait for and a fence."""
        if self._futex is not None and 1 in self._asleep:
            self._wakes += 1
            # No other write has this value: one that a late rank writes over a later one prevents sleeps all the same.
            self._word[0] = (self._wakes * len(self._asleep) + self._rank) & _INT32_MAX
            self._futex(_WAKE, _INT32_MAX)  # wakes all

    def wait(
        self,
        counters: memoryview,
        other: int,
        count: int,
        polls: int = 0,
        progress: Callable[[], object] | None = None,
    ) -> None:
        """Block until another rank's counter has reached `count`.

        Args:
            counters: of all ranks, in shared memory.
            other: the rank to wait for.
            count: the value to wait for; counters only grow.
            polls: how often this rank has polled before.
            progress: is called in place of the Futex's; what it raises ends the wait.
        """
        progress = progress or self._progress
        can_sleep = self._futex is not None
        sleeps = can_sleep and (self._sleeps or not self.is_program_thread)
        if can_sleep and self._sleeps_left:
            sleeps, polls, self._sleeps_left = True, POLLS, self._sleeps_left - 1
        while counters[other] < count:
            if sleeps and polls >= POLLS and not progress():
                self._sleep(counters, other, count, progress)
                continue
            if self._yields_long() and can_sleep and not sleeps:
                self._sleeps_after_loss = min(2 * self._sleeps_after_loss, _MOST_SLEEPS)
                sleeps, polls, self._sleeps_left = True, POLLS, self._sleeps_after_loss
            polls += 1
            if polls % POLLS_BETWEEN_PROGRESS == 0:
                progress()

    @staticmethod
    def _yields_long() -> bool:
        """Yield the core; return whether another process computed on it for long."""
        began_ns = perf_counter_ns()
        os.sched_yield()
        return perf_counter_ns() - began_ns > _LOST_NS

    def _sleep(self, counters: memoryview, other: int, count: int, progress: Callable[[], object]) -> None:
        """Sleep until another rank wakes it or the nap is over.

        This rank marks itself asleep, then reads the counter; the other rank writes its counter, then reads the marks.
        With a fence between the two, at least one of them reads the other's write (as in Dekker's mutual exclusion),
        and a futex word that has changed prevents the sleep.
        """
        assert self._futex is not None
        seen = self._word[0]
        self._asleep[self._rank] = 1
        try:
            self._fence()
            if counters[other] < count:
                self._futex(_WAIT, seen)
                progress()
        finally:
            self._asleep[self._rank] = 0
