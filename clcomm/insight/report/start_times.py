"""The time from a process's start to the end of its first step, and its parts."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

#: The place of a process's start in /proc/self/stat, in clock ticks since the host's, behind its name in brackets.
_START_FIELD = 19


class StartTimes:
    """The parts of a process's start in order, each of which begins where the one before it ended.

    parts: seconds by part. The first begins with the process, or with this object where Linux's /proc is missing.
    """

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._since_s = time.perf_counter() - process_age_s()

    def end(self, part: str) -> None:
        """End a part; a part that has ended before is not counted again."""
        if part not in self.parts:
            now_s = time.perf_counter()
            self.parts[part], self._since_s = now_s - self._since_s, now_s


def process_age_s() -> float:
    """Return how long this process has existed, in s, to a clock tick of 10 ms; 0 where that is not known.

    Source: proc_pid_stat(5), starttime.
    """
    with suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        began_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    return 0.0
