"""A rank's record for the exit monitor: its number, its step, and the state of its exit."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from clcomm.base.host.launcher import JOB_VARIABLE
from clcomm.base.host.rank_process import ancestors, start_time
from clcomm.comm.watch.exit_monitor_process import (
    FAILING,
    JOINED,
    PID,
    RANK,
    RECORD_BYTES,
    REPORTED,
    RUNNING,
    START,
    STATE,
    STEP,
    children_of,
    is_child,
    is_gone,
    kill_if,
)

_WORDS = RECORD_BYTES // 8


class RankRecord:
    """This rank's record, in private memory at first, and in memory of the host's ranks once those are watched.

    Attributes:
        is_watched: whether the host's exit monitor reads it.
        start_pipe: leads to the process that watches this rank until it has a Communicator; -1: there is none.
    """

    def __init__(self) -> None:
        self._records: memoryview = memoryview(bytearray(RECORD_BYTES)).cast("q")
        self._start = 0  # of this rank's words in the records
        self.is_watched, self.start_pipe = False, -1

    def join(self, records: memoryview, local_rank: int, rank: int) -> None:
        """Move to the `local_rank`-th of the records that the host's ranks share."""
        start = local_rank * _WORDS
        for word in (STEP, STATE):
            records[start + word] = self._records[self._start + word]
        records[start + START], records[start + RANK], records[start + PID] = start_time(os.getpid()), rank, os.getpid()
        self._records, self._start, self.is_watched = records, start, True
        self._notify_start_monitor(JOINED)

    @property
    def rank(self) -> int:
        """This process's rank in the job; 0 in a job of one rank, and before the first Communicator."""
        return int(self._records[self._start + RANK])

    @rank.setter
    def rank(self, rank: int) -> None:
        self._records[self._start + RANK] = rank

    def note_step(self, step: int) -> None:
        """Note this rank's step of the training, for messages about its end."""
        self._records[self._start + STEP] = step

    def note(self, state: int) -> None:
        """Note the state of this rank's exit, unless a later one is noted."""
        self._records[self._start + STATE] = max(state, self._records[self._start + STATE])
        self._notify_start_monitor(state)

    def _notify_start_monitor(self, state: int) -> None:
        if self.start_pipe >= 0:
            with suppress(OSError):
                os.write(self.start_pipe, bytes([state]))

    def at_step(self) -> str:
        """Return " at step N", or "" if no step was noted."""
        step = self._records[self._start + STEP]
        return f" at step {step}" if step else ""

    def another_failed(self) -> bool:
        """Return whether another rank of this host ends the job, or is dead."""
        for start in range(0, len(self._records), _WORDS):
            state, pid = self._records[start + STATE], self._records[start + PID]
            if start != self._start and pid and (state == FAILING or (state == RUNNING and is_gone(pid))):
                return True
        return False

    def wait_for_report(self, within_s: float) -> None:
        """Wait until the exit monitor has reported another rank's death; the launcher may end with this process."""
        deadline = time.monotonic() + within_s
        while self.is_watched and not any(self._records[REPORTED::_WORDS]) and time.monotonic() < deadline:
            time.sleep(0.005)

    def end_siblings(self) -> None:
        """Kill the job's other ranks on this host.

        They are the ranks in the records, and the launcher's other children that belong to the same job.
        """
        for start in range(0, len(self._records), _WORDS):
            pid, began = self._records[start + PID], self._records[start + START]
            if pid not in (0, os.getpid()):
                kill_if(lambda pid, began: start_time(pid) == began, pid, began)
        between, launcher = ancestors(os.getpid())
        job = os.environ.get(JOB_VARIABLE, "")
        for pid in children_of(launcher, job) if launcher else ():
            if pid not in (os.getpid(), *between):
                kill_if(is_child, pid, launcher, job)
