"""A readable trace of a running job: rank 0's records so far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clcomm.trace.clocks import ClockReading, aligned
from clcomm.trace.events import RankEvents
from clcomm.trace.part_file import Rows, TracePart

#: It is brought up to date after so many seconds, when a collective or a step ends.
LIVE_S = 1.0


class LiveFile:
    """A rank's events as an array of JSON without its closing bracket, as viewers take it; each write is whole.

    Creating it and `append` may raise OSError.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], clock: ClockReading):
        self._header, self._clock = header, clock
        self._origin_ns = aligned([clock])(header["began_ns"])
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - open until the trace is closed
        self._between = "[\n"
        self.append({})

    def append(self, rows: Mapping[str, Rows]) -> None:
        """Write rows of KINDS; they share lanes and counters with those of this call alone."""
        part = TracePart.of(self._header, {"clocks": [self._clock], **rows})
        for piece in RankEvents(part, 1 << 62).pieces(self._origin_ns):
            self._file.write((self._between + piece).encode())
            self._between = ",\n"

    def close(self) -> None:
        self._file.close()
