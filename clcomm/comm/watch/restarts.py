"""The exchange between `clcomm run` and the job that it restarts.

CLCOMM_RESTART is the number of restarts: from 1 up the job should resume from its newest checkpoint. CLCOMM_PROGRESS
names a small file to which rank 0 writes its current step and the newest saved one, so that `clcomm run` has both,
however the job ends. Ranks also record there that they have started and completed: some MPI launchers return 0 for a
job whose ranks were all killed.
"""

from __future__ import annotations

import contextlib
import os
import sys

from clcomm.base.host import variables

RESTART, PROGRESS = "CLCOMM_RESTART", "CLCOMM_PROGRESS"


#: The file's words (int64): the current step; the newest saved step; whether a rank has started; whether one has
#: completed; the number of the last planted fault (chaos.py); the signal that ends a rank.
STEP, SAVED, STARTED, COMPLETED, FAULTS, SIGNAL = range(6)


_WORD_BYTES = 8


FILE_BYTES = 6 * _WORD_BYTES


class ProgressFile:
    """The progress file of this process, opened at the first note; without `clcomm run` nothing is written."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def note(self, word: int, value: int) -> None:
        """Write one of the file's words."""
        if self._descriptor is None:
            self._descriptor = -1
            path = variables.text(PROGRESS)
            if path:
                with contextlib.suppress(OSError):  # `clcomm run` is on another host
                    self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # not mapped: a truncated file or a full disk must not end a rank
                os.pwrite(self._descriptor, value.to_bytes(_WORD_BYTES, sys.byteorder), word * _WORD_BYTES)

    def note_started(self) -> None:
        """Record that a rank has started: without one that completes, the job has failed."""
        self.note(STARTED, 1)

    def note_completed(self) -> None:
        """Record that this rank's program has ended without a failure."""
        self.note(COMPLETED, 1)


def restart_number() -> int:
    """Return how often `clcomm run` has restarted this job; 0 for a first start, and without it."""
    return variables.count(RESTART)


def read_progress(path: str) -> list[int]:
    """Return the words of a progress file; zeros where it is missing or too short."""
    content = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        content = file.read(FILE_BYTES)
    whole = content.ljust(FILE_BYTES, b"\0")
    return [int.from_bytes(whole[at : at + _WORD_BYTES], sys.byteorder) for at in range(0, FILE_BYTES, _WORD_BYTES)]
