"""What `clcomm run` and the job that it starts again tell each other.

CLCOMM_RESTART says how often the job was started again: from 1 up it should go on from its newest checkpoint.
CLCOMM_PROGRESS names a small file, in which rank 0 notes the step it is at and the newest one that is saved; so the
launcher knows both, however the job ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

RESTART, PROGRESS = "CLCOMM_RESTART", "CLCOMM_PROGRESS"
#: The file's words (int64): the step under way, the newest that is saved.
STEP, SAVED = range(2)
FILE_BYTES = 16


class _File:
    words: Any = None
    is_open = False


def restart_number() -> int:
    """Return how often `clcomm run` has started this job again; 0 for a first start, and without it."""
    text = os.environ.get(RESTART, "")
    return int(text) if text.isdigit() else 0


def note(word: int, step: int, rank: int) -> None:
    """Note a step for the launcher, if there is one and this is rank 0."""
    if not _File.is_open:
        _File.is_open = True
        path = os.environ.get(PROGRESS)
        if path and rank == 0:
            with contextlib.suppress(OSError):  # a launcher on another host
                _File.words = open_progress(path)
    if _File.words is not None:
        _File.words[word] = step


def open_progress(path: str) -> Any:
    """Return the words of a progress file, to read and to write; OSError where that is not possible."""
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), FILE_BYTES)).cast("q")
