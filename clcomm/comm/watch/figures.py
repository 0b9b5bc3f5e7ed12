"""The figures of a rank on its host's status page: speed, communication, waits, memory, cores; the watchdog takes them.

All are read from the watchdog's thread, about once a second: the program itself notes its step and its phase alone
(`clcomm/comm/stats/events.py`). `before` has step and samples at the look before, and the seconds since, as ranks look
at different moments.
"""

from __future__ import annotations

import json
import os
import resource
from collections import deque
from collections.abc import Callable
from time import perf_counter, perf_counter_ns, process_time
from typing import Protocol

from clcomm.base.host import usable_cores
from clcomm.comm.stats.events import NOW, Call
from clcomm.comm.stats.flight_recorder import FlightRecorder

#: The speed is that of the last steps within this time.
WINDOW_NS = 10 * 10**9
#: A step that takes this many times as long as the mean of those before it counts as a pause.
_PAUSE = 2.0
_PAGE_BYTES = resource.getpagesize()


class Watched(Protocol):
    """A Communicator as its watchdog sees it."""

    size: int
    #: Raises a time-out in the program; None: the job ends.
    interrupt: Callable[[str, float, Callable[[], None]], bool] | None

    @property
    def current(self) -> tuple[Call, int, float] | None:
        """The collective that it is in: (call, sequence number, begin in perf_counter's seconds); None outside."""

    @property
    def sequence(self) -> int:
        """The number of its last collective."""

    def unfinished(self) -> list[tuple[Call, int]]:
        """Return the collectives that it has begun, with their numbers."""

    def communicated(self) -> float:
        """Return the seconds spent in collectives."""


class Figures:
    """Takes the figures of one Communicator's rank.

    Args:
        recorder: has the last collectives.
    """

    def __init__(self, recorder: FlightRecorder):
        self._recorder = recorder
        self._steps: deque[tuple[int, int, int]] = deque()  # begin, number, samples so far
        self._at_s, self._busy_s, self._communicated_s = perf_counter(), process_time(), 0.0
        self._looked = NOW.step, NOW.samples

    def take(self, watched: Watched, current: tuple[Call, int, float] | None) -> str:
        """Return the figures as JSON; `communication`, `waiting` and `cores` since the last time.

        Args:
            watched: the Communicator.
            current: the collective that it is in, or None.
        """
        now_s, busy_s = perf_counter(), process_time()
        communicated_s = watched.communicated() + (now_s - current[2] if current else 0.0)
        elapsed_s = max(now_s - self._at_s, 1e-9)
        step, samples, (steps_per_s, samples_per_s) = NOW.step, NOW.samples, self._rates()
        waiting, waits_for = self._waits(now_s)
        found = {
            "step": step, "steps_per_s": _short(steps_per_s), "samples": samples,
            "before": [*self._looked, _short(elapsed_s)], "samples_per_s": _short(samples_per_s),
            "phase": NOW.phase, "collectives": watched.sequence,
            "communication": _short(min(1.0, max(0.0, communicated_s - self._communicated_s) / elapsed_s)),
            "waiting": _short(waiting), "waits_for": waits_for, "memory": _resident_bytes(),
            "cores": _short((busy_s - self._busy_s) / elapsed_s), "cores_allowed": len(usable_cores()),
        }  # fmt: skip
        self._at_s, self._busy_s, self._communicated_s = now_s, busy_s, communicated_s
        self._looked = step, samples
        return json.dumps(found, separators=(",", ":"))

    def _rates(self) -> tuple[float, float]:
        """Return steps and samples a second, from begin to begin; a long pause counts up to now."""
        if not NOW.step_ns:
            return 0.0, 0.0
        now_ns, steps = perf_counter_ns(), self._steps
        if steps and NOW.step < steps[-1][1]:
            steps.clear()  # another run has begun
        if not steps or NOW.step != steps[-1][1]:
            steps.append((NOW.step_ns, NOW.step, NOW.samples))
        while len(steps) > 2 and steps[1][0] < now_ns - WINDOW_NS:
            steps.popleft()
        (first_ns, first, samples), (last_ns, last, all_samples) = steps[0], steps[-1]
        if last <= first or last_ns <= first_ns:
            return 0.0, 0.0
        seconds = (last_ns - first_ns) / 1e9
        if (now_ns - last_ns) / 1e9 > _PAUSE * seconds / (last - first) + 1.0:
            seconds = (now_ns - first_ns) / 1e9
        return (last - first) / seconds, (all_samples - samples) / seconds

    def _waits(self, now_s: float) -> tuple[float, int]:
        """Return the share of time spent waiting in the last collectives, and for which rank most; -1: none."""
        events = [event for event in self._recorder.last() if event.began_s >= self._at_s]
        if not events:
            return 0.0, -1
        waited: dict[int, float] = {}
        for event in events:
            waited[event.last_rank] = waited.get(event.last_rank, 0.0) + (event.wait_s or 0.0)
        share = sum(waited.values()) / max(now_s - events[0].began_s, 1e-9)
        return min(1.0, share), max(waited, key=lambda rank: waited[rank])


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _resident_bytes() -> int:
    """Return the bytes of this process in memory; 0: not known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def about_program() -> str:
    """Return this process's command line without the path of Python."""
    try:
        with open(f"/proc/{os.getpid()}/cmdline", "rb") as file:
            words = file.read(4096).decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        words = []
    shown = [os.path.basename(words[0]), *words[1:]] if words else []
    return " ".join(shown)[:400]
