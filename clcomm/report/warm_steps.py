"""A rank's first steps, which build kernels and fill caches, kept out of all means."""

from __future__ import annotations

from clcomm.communicator import Communicator
from clcomm.report.documents import Record
from clcomm.report.start_times import StartTimes
from clcomm.stats.comm_stats import CommStats
from clcomm.stats.cores import CoreWaits
from clcomm.stats.events import Collective, Phase

#: Steps at the start of a run that no mean counts, if there are more; of fewer the first alone. See docs/reports.md.
WARM_UP_STEPS = 10


class FirstSteps:
    """An observer of the figures of a rank's first steps, and of the time before them, which then leaves.

    figures: the `cold` of a rank's record; None before the first step.

    Args:
        core_waits: an earlier observer; None: waits for a core are not measured.
        start: receives the end of the first step.
    """

    def __init__(self, comm: Communicator, core_waits: CoreWaits | None = None, start: StartTimes | None = None):
        self.figures: Record | None = None
        self._comm, self._core_waits, self._start = comm, core_waits, start or StartTimes()
        self._steps, self._training_s, self._data_wait_s = 0, 0.0, 0.0

    def collective_finished(self, event: Collective) -> None:
        """The Communicator's stats count collectives."""

    def phase_finished(self, phase: Phase) -> None:
        """Count a step, or a wait for data in one."""
        if phase.name == "data":
            self._data_wait_s += phase.seconds
        elif phase.name == "step":
            self._start.end("first_step")
            self._steps, self._training_s = self._steps + 1, self._training_s + phase.seconds
            if self._steps in (1, WARM_UP_STEPS):
                self.figures = {
                    "steps": self._steps,
                    "training_s": self._training_s,
                    "data_wait_s": self._data_wait_s,
                    "core_waits_s": None if self._core_waits is None else self._core_waits.seconds,
                    "stats": self._comm.stats.state(),
                }
                if self._steps == WARM_UP_STEPS:
                    self._comm.remove_observer(self)


def warm(record: Record, stats: CommStats) -> tuple[Record, CommStats]:
    """Return a rank's record and stats without its first steps; unchanged if these are unknown."""
    cold = record["cold"]
    if cold is None or not record["steps"] or record["steps"] <= cold["steps"] or record["training_s"] is None:
        return record, stats
    changed = {
        "steps": record["steps"] - cold["steps"],
        "training_s": max(0.0, record["training_s"] - cold["training_s"]),
        "data_wait_s": _less(record["data_wait_s"], cold["data_wait_s"]),
        "core_waits_s": record["core_waits_s"] and {
            name: _less(seconds, (cold["core_waits_s"] or {}).get(name, 0.0))
            for name, seconds in record["core_waits_s"].items()
        },
    }  # fmt: skip
    return {**record, **changed}, stats.without(CommStats.merged([cold["stats"]], stats.world_size))


def _less(seconds: float | None, earlier: float) -> float | None:
    return None if seconds is None else max(0.0, seconds - earlier)
