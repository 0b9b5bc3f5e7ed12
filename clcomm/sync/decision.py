"""Choices that clcomm made by measuring, with the measurements, for reports and logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

#: The label under which the Communicator's stats count the collectives of trials.
TUNING = "tuning"
_log = logging.getLogger("clcomm")


@dataclass(frozen=True)
class Trial:
    """One of the options: its name, median seconds (None: not tried), the model's prediction, and the steps it took."""

    name: str
    measured_s: float | None
    predicted_s: float | None = None
    steps: int = 0


@dataclass(frozen=True)
class Decision:
    """A choice that was made at a step, and its evidence.

    measures: the quantity of the trials' seconds; without trials, why there are none. reason: how the trials led to the
    choice, where the least time alone does not explain it.
    """

    what: str
    chosen: str
    measures: str
    evidence: tuple[Trial, ...]
    at_step: int
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON."""
        return asdict(self) | {"evidence": [asdict(trial) for trial in self.evidence]}

    def __str__(self) -> str:
        if not self.evidence:
            return f"{self.what}: {self.chosen}, chosen at step {self.at_step} {self.measures}"
        uneven = len({trial.steps for trial in self.evidence}) > 1  # trials that were far behind ended early
        trials = ", ".join(_in_words(trial, uneven) for trial in self.evidence)
        reason = f", {self.reason}" if self.reason else ""
        return f"{self.what}: {self.chosen}, chosen at step {self.at_step} by {self.measures}{reason}: {trials}"


class DecisionLog:
    """Decisions in the order in which they were made; rank 0 logs each of them."""

    def __init__(self, rank: int):
        self._rank = rank
        self._made: list[Decision] = []

    def add(self, decision: Decision) -> None:
        """Keep a decision and log it."""
        self._made.append(decision)
        if self._rank == 0:
            _log.log(logging.INFO if decision.evidence else logging.DEBUG, "%s", decision)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._made)


def _in_words(trial: Trial, with_steps: bool) -> str:
    steps = f" in {trial.steps} steps" if with_steps else ""
    times = [] if trial.measured_s is None else [f"{trial.measured_s * 1e3:.3f} ms{steps}"]
    if trial.predicted_s is not None:
        times.append(f"predicted {trial.predicted_s * 1e3:.3f} ms")
    return f"{trial.name} ({', '.join(times) or 'not tried'})"
