"""What clcomm chose by measuring, and what it measured: for reports and logs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Trial:
    """One of the choices: its name, median seconds (None: not tried), the model's prediction, and how often tried."""

    name: str
    measured_s: float | None
    predicted_s: float | None = None
    steps: int = 0


@dataclass(frozen=True)
class Decision:
    """A choice that was made at a step, and its evidence: `measures` says what the trials' seconds are.

    Without trials it says why there are none. reason: why the trials led to it, where that takes more than the least
    time.
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
        uneven = len({trial.steps for trial in self.evidence}) > 1  # those far behind were dropped early
        trials = ", ".join(_in_words(trial, uneven) for trial in self.evidence)
        reason = f", {self.reason}" if self.reason else ""
        return f"{self.what}: {self.chosen}, chosen at step {self.at_step} by {self.measures}{reason}: {trials}"


def _in_words(trial: Trial, says_steps: bool) -> str:
    steps = f" in {trial.steps} steps" if says_steps else ""
    times = [] if trial.measured_s is None else [f"{trial.measured_s * 1e3:.3f} ms{steps}"]
    if trial.predicted_s is not None:
        times.append(f"predicted {trial.predicted_s * 1e3:.3f} ms")
    return f"{trial.name} ({', '.join(times) or 'not tried'})"
