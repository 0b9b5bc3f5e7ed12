"""The flight recorder: a rank's last collectives, written to a file when the job fails."""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque

from clcomm.base.host import variables
from clcomm.comm.stats.events import Collective, Row

SCHEMA = 1
#: How many operations the recorder keeps, and how many of them a message names.
KEPT, NAMED = 64, 4


class FlightRecorder:
    """An observer that keeps the last operations, at the cost of one append each."""

    def __init__(self, kept: int = KEPT):
        self._ring: deque[Collective] = deque(maxlen=kept)
        self.collective_finished = self._ring.append

    def last(self) -> list[Collective]:
        """Return the kept operations, oldest first."""
        return [*self._ring.copy()]

    def operations(self) -> list[Row]:
        """Return the kept operations, oldest first, in JSON-compatible form."""
        return [event._asdict() for event in self._ring.copy()]

    def summary(self) -> str:
        """Return the last few operations in one line, or "none"."""
        return ", ".join(_described(event) for event in [*self._ring.copy()][-NAMED:]) or "none"

    def dump(self, folder: str, rank: int, **more: object) -> str:
        """Write the operations and `more` to rank-N.json in a folder, readable by its owner only; return the path.

        Raises OSError where that file exists or cannot be written.

        Args:
            folder: an existing one.
            rank: this process's.
            more: further fields of the file, JSON-compatible.
        """
        path = os.path.join(folder, f"rank-{rank}.json")
        content = {"schema": SCHEMA, "rank": rank, **more, "operations": self.operations()}
        write_private(path, json.dumps(content, indent=1).encode())
        return path


def write_private(path: str, content: bytes) -> None:
    """Write a new file that its owner alone can read; OSError where it exists or cannot be written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)


def new_dump_folder() -> str:
    """Create a folder private to this user in CLCOMM_DUMP_DIR or the temporary directory; return "" on failure."""
    try:
        return tempfile.mkdtemp(prefix="clcomm-dump-", dir=variables.text("CLCOMM_DUMP_DIR") or None)
    except OSError:
        return ""


def _described(event: Collective) -> str:
    name = f"{event.operation} {event.label!r}" if event.label else event.operation
    part = f" on {event.part}" if event.part else ""
    bucket = f" bucket {event.bucket}" if event.bucket >= 0 else ""
    failed = " (failed)" if event.failed else ""
    return f"#{event.sequence} {name}{part}{bucket} {event.nbytes:,} bytes in {event.seconds * 1e3:.1f} ms{failed}"
