"""The flight recorder: a rank's last collectives, kept for the case that the job ends badly."""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from typing import Any

from clcomm.events import Collective

SCHEMA = 1
#: How many operations it remembers, and how many of them a message names.
REMEMBERED, NAMED = 64, 4


class FlightRecorder:
    """An observer that remembers the last operations; it costs an append for each."""

    def __init__(self, remembered: int = REMEMBERED):
        self._ring: deque[Collective] = deque(maxlen=remembered)
        self.collective_finished = self._ring.append

    def operations(self) -> list[dict[str, Any]]:
        """Return the remembered operations, oldest first, as plain numbers and texts."""
        return [event._asdict() for event in self._ring.copy()]

    def last_words(self) -> str:
        """Return the last few operations in a line, or "none"."""
        return ", ".join(_in_words(event) for event in [*self._ring.copy()][-NAMED:]) or "none"

    def dump(self, folder: str, rank: int, **more: Any) -> str:
        """Write what it remembers, and `more`, to rank-N.json in a folder, readable by its owner alone; return where.

        Raises OSError where that file is already there, or cannot be written.
        """
        path = os.path.join(folder, f"rank-{rank}.json")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w") as file:
            json.dump({"schema": SCHEMA, "rank": rank, **more, "operations": self.operations()}, file, indent=1)
        return path


def new_dump_folder() -> str:
    """Return a new folder of this user alone, in CLCOMM_DUMP_DIR or the temporary directory; "" where none can be."""
    try:
        return tempfile.mkdtemp(prefix="clcomm-dump-", dir=os.environ.get("CLCOMM_DUMP_DIR") or None)
    except OSError:
        return ""


def _in_words(event: Collective) -> str:
    name = f"{event.operation} {event.label!r}" if event.label else event.operation
    bucket = f" bucket {event.bucket}" if event.bucket >= 0 else ""
    failed = " (failed)" if event.failed else ""
    return f"#{event.sequence} {name}{bucket} {event.nbytes:,} bytes in {event.seconds * 1e3:.1f} ms{failed}"
