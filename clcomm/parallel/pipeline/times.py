"""Computing and idle times of ranks in a pipeline's steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clcomm.communicator import Communicator
from clcomm.schedules.pipeline import Action

#: The most steps that are remembered.
MOST_STEPS = 1000
_TIMES = "times"


class Bubble(NamedTuple):
    """The share of the ranks' time without computing.

    Attributes:
        measured: over all ranks and steps: 1 - computing / (ranks x time from the step's begin to its last action).
        formula: for stages that take equally long, and messages that take no time.
        steps: number of measured steps.
    """

    measured: float
    formula: float
    steps: int

    def __str__(self) -> str:
        return f"bubble {self.measured:.1%} measured over {self.steps} steps, {self.formula:.1%} by the formula"


class StepTimes:
    """Each step's span on this rank, from when all ranks began to this rank's last action, and its computing in it."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)

    def add(self, began_s: float, turns: Sequence[tuple[Action, float, float]]) -> None:
        self._steps.append((turns[-1][2] - began_s, sum(end - begin for _, begin, end in turns)))

    def reset(self) -> None:
        self._steps.clear()

    def bubble(self, comm: Communicator, formula: float) -> Bubble:
        """Return the bubble of the steps since the last reset, NaN if there were none; collective."""
        own = np.array(self._steps, np.float64).reshape(-1, 2)
        if not len(own):
            return Bubble(float("nan"), formula, 0)
        everyone = comm.all_gather(own, label=_TIMES)
        spans, computing = everyone[:, :, 0].max(axis=0).sum(), everyone[:, :, 1].sum()
        return Bubble(float(1 - computing / (comm.size * spans)), formula, len(own))
