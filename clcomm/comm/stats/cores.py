"""The cores on which a process may run, and how long a thread was ready to run while others used them."""

from __future__ import annotations

import contextlib
import os
import weakref

from clcomm.base.host import usable_cores
from clcomm.comm.stats.events import PACKING, Collective, Phase

#: Of the calling thread: ns on a core, ns ready to run without one, time slices (Linux's
#: Documentation/scheduler/sched-stats.rst).
_SCHEDSTAT = "/proc/thread-self/schedstat"


#: Phases that contain other phases, for which the waits are counted.
_STEP, _EPOCH = "step", "epoch"


#: Shorter phases are not measured: a thread that has to wait for a core waits about a millisecond or more, the length
#: of Linux's time slices, and reading the file takes microseconds.
_SHORTEST_S = 5e-4


#: Of steps shorter than this one in so many is measured.
_LONG_STEP_S, _MEASURED_EVERY = 0.02, 7


def allowed_cpus() -> str:
    """Return the CPUs on which this process may run, in Linux's format: "0-3,8"."""
    numbers = sorted(usable_cores())
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    runs = zip(starts, ends, strict=True)
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in runs)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list in Linux's format; ValueError for other text, and for numbers of 65,536 or more."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first) < 1 << 16):
            raise ValueError(f"expected CPUs such as 0-3,8, got {part!r}")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


class CoreWaits:
    """An observer that adds up, by phase, how long the thread that created it waited for a core.

    A phase's wait is the wait since the last measured phase, and at most the phase's own time. Of short steps some are
    measured, and all are taken to have waited for the same share of their phases. `seconds` is None where Linux does
    not report waits. The figure is meaningless for a phase in which ranks wait for each other: they poll, and yield
    their core to others.
    """

    def __init__(self) -> None:
        self._phases: dict[str, list[float]] = {}  # seconds of all, of those that were measured, and of their waits
        self._skipped = 0  # steps that are still to be left out
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        self._seen_ns = self._read()

    @property
    def seconds(self) -> dict[str, float] | None:
        """Seconds of waiting by the phase's name; None where Linux does not report them."""
        if self._file is None:
            return None
        return {name: waited * whole / measured for name, (whole, measured, waited) in self._phases.items() if measured}

    def collective_finished(self, event: Collective) -> None:
        pass

    def phase_finished(self, phase: Phase) -> None:
        name, seconds = phase.name, phase.seconds
        if name == _STEP:
            self._step_finished(seconds)
        elif seconds >= _SHORTEST_S and name not in PACKING and name != _EPOCH and self._file is not None:
            sums = self._phases.setdefault(name, [0.0, 0.0, 0.0])
            sums[0] += seconds
            if self._skipped and seconds < _LONG_STEP_S:
                return
            before_ns, self._seen_ns = self._seen_ns, self._read()
            sums[1] += seconds
            sums[2] += min(seconds, (self._seen_ns - before_ns) * 1e-9)

    def _step_finished(self, seconds: float) -> None:
        if not self._skipped:
            self._skipped = _MEASURED_EVERY - 1 if seconds < _LONG_STEP_S else 0
        else:
            self._skipped -= 1
            if not self._skipped:
                self._seen_ns = self._read()

    def _read(self) -> int:
        return 0 if self._file is None else int(os.pread(self._file, 80, 0).split()[1])
