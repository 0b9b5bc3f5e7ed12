"""A rank's first steps, which build kernels and fill caches, kept out of all means."""

from __future__ import annotations

from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.stats.cores import CoreWaits
from clcomm.comm.stats.events import Collective, Phase
from clcomm.comm.stats.steps import STEP, WARM_UP_STEPS, Steps
from clcomm.insight.report.documents import Record
from clcomm.insight.report.start_times import StartTimes


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
