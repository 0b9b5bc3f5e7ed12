"""A rank's first steps, which build kernels and are kept out of all means; and the start of its process before them."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.cores import CoreWaits
from clcomm.comm.stats.events import Collective, Phase
from clcomm.comm.stats.steps import STEP, WARM_UP_STEPS, Steps
from clcomm.insight.report.documents import Record


class FirstSteps:
    """An observer of a rank's first steps, which then leaves; the Communicator's stats count steps from it on.

    Args:
        core_waits: an earlier observer.
        start: receives the end of the first step.
    """

    def __init__(self, comm: Communicator, core_waits: CoreWaits, start: StartTimes):
        self._comm, self._core_waits, self._start = comm, core_waits, start
        self._steps, self._waits_s = 0, dict[str, float]()
        comm.stats.steps = Steps()
        comm.add_observer(self)

    @property
    def figures(self) -> Record | None:
        """The `cold` of a rank's record; None before the first step."""
        cold = self._comm.stats.steps.cold
        return None if cold is None else {**cold, "core_waits_s": self._waits_s}

    def collective_finished(self, event: Collective) -> None:
        """The Communicator's stats count collectives."""

    def phase_finished(self, phase: Phase) -> None:
        """Keep the waits up to the end of the first steps."""
        if phase.name == STEP:
            self._start.end("first_step")
            self._steps += 1
            if self._steps in (1, WARM_UP_STEPS):
                self._waits_s = dict(self._core_waits.seconds or {})
            if self._steps == WARM_UP_STEPS:
                self._comm.remove_observer(self)


# --- The time from a process's start to the end of its first step, and its parts. ---

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
