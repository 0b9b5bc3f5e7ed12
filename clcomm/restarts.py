"""What `clcomm run` and the job that it starts again tell each other.

CLCOMM_RESTART says how often the job was started again: from 1 up it should go on from its newest checkpoint.
CLCOMM_PROGRESS names a small file, in which rank 0 notes the step it is at and the newest one that is saved; so the
launcher knows both, however the job ends. Ranks also note there that they have started, and that they have completed:
some MPI launchers return 0 for a job of which every rank was killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

RESTART, PROGRESS = "CLCOMM_RESTART", "CLCOMM_PROGRESS"
#: The file's words (int64): the step under way, the newest that is saved; whether any rank started, and completed.
STEP, SAVED, STARTED, COMPLETED = range(4)
FILE_BYTES = 32


class _File:
    words: Any = None
    is_open = False


def restart_number() -> int:
    """Return how often `clcomm run` has started this job again; 0 for a first start, and without it."""
    text = os.environ.get(RESTART, "")
    return int(text) if text.isdigit() else 0


def note(word: int, step: int, rank: int) -> None:
    """Note a step for the launcher, if there is one and this is rank 0."""
    if rank == 0:
        _write(word, step)


def note_started() -> None:
    """Note for the launcher that a rank of the job runs, which has to complete."""
    _write(STARTED, 1)


def note_completed() -> None:
    """Note for the launcher that this rank's program is over, without a failure."""
    _write(COMPLETED, 1)


def _write(word: int, value: int) -> None:
    if not _File.is_open:
        _File.is_open = True
        path = os.environ.get(PROGRESS)
        if path:
            with contextlib.suppress(OSError, ValueError):  # a launcher on another host; or a file cut short
                _File.words = open_progress(path)
    if _File.words is not None:
        _File.words[word] = value


def open_progress(path: str) -> Any:
    """Return the words of a progress file, to read and to write; OSError where that is not possible."""
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), FILE_BYTES)).cast("q")
