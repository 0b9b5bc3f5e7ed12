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

from clcomm import variables

RESTART, PROGRESS = "CLCOMM_RESTART", "CLCOMM_PROGRESS"
#: The file's words (int64): the current step; the newest saved step; whether a rank has started; whether one has
#: completed.
STEP, SAVED, STARTED, COMPLETED = range(4)
_WORD_BYTES = 8
FILE_BYTES = 4 * _WORD_BYTES


class _File:
    """The progress file of this process, opened at the first note."""

    descriptor = -1
    is_open = False


def restart_number() -> int:
    """Return how often `clcomm run` has restarted this job; 0 for a first start, and without it."""
    return variables.count(RESTART)


def note(word: int, step: int, rank: int) -> None:
    """Record a step for `clcomm run`, if this is rank 0 of a job that it started.

    Args:
        word: STEP or SAVED.
        step: the number to record.
        rank: this process's rank.
    """
    if rank == 0:
        _write(word, step)


def note_started() -> None:
    """Record for `clcomm run` that a rank has started: without one that completes, the job has failed."""
    _write(STARTED, 1)


def note_completed() -> None:
    """Record for `clcomm run` that this rank's program has ended without a failure."""
    _write(COMPLETED, 1)


def _write(word: int, value: int) -> None:
    if not _File.is_open:
        _File.is_open = True
        path = variables.text(PROGRESS)
        if path:
            with contextlib.suppress(OSError):  # `clcomm run` is on another host
                _File.descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    if _File.descriptor >= 0:
        with contextlib.suppress(OSError):  # written, not mapped: a truncated file or a full disk must not end a rank
            os.pwrite(_File.descriptor, value.to_bytes(_WORD_BYTES, sys.byteorder), word * _WORD_BYTES)


def read_progress(path: str) -> list[int]:
    """Return the words of a progress file; zeros where it is missing or too short."""
    content = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        content = file.read(FILE_BYTES)
    whole = content.ljust(FILE_BYTES, b"\0")
    return [int.from_bytes(whole[at : at + _WORD_BYTES], sys.byteorder) for at in range(0, FILE_BYTES, _WORD_BYTES)]
