"""A run's steps in windows, for confidence intervals."""

from __future__ import annotations

from clcomm.measure.intervals import Estimate, estimate
from training.metrics import WARM_UP_STEPS, StepRecord
from training.trainer import Callback

_FEWEST_STEPS, _MOST_WINDOWS = 4, 64


class StepWindows(Callback):
    """A callback that keeps mean step and communication times of windows of consecutive steps.

    The first steps don't count. At 64 windows neighbours are merged, so that memory stays bounded. Neighbouring steps
    are correlated, windows of many steps hardly at all, so that intervals over windows are valid.
    """

    every_step = False

    def __init__(self) -> None:
        self._windows: list[tuple[float, float]] = []  # seconds of all steps, and of communication, of each window
        self._size = _FEWEST_STEPS
        self._steps, self._open = 0, (0, 0.0, 0.0)  # steps, seconds and communication of the window being filled

    def step_finished(self, record: StepRecord) -> None:
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            return
        steps, seconds, communicated_s = self._open
        steps, seconds, communicated_s = steps + 1, seconds + record.seconds, communicated_s + record.communication_s
        self._open = steps, seconds, communicated_s
        if steps == self._size:
            self._windows.append((seconds, communicated_s))
            self._open = (0, 0.0, 0.0)
            if len(self._windows) == _MOST_WINDOWS:
                pairs = zip(self._windows[::2], self._windows[1::2], strict=True)
                self._windows = [(a + c, b + d) for (a, b), (c, d) in pairs]
                self._size *= 2

    def estimates(self) -> dict[str, Estimate] | None:
        """Return a step's time and its time in communication, in ms; None before the first whole window."""
        if not self._windows:
            return None
        scale = 1e3 / self._size
        return {
            "step_ms": estimate(seconds * scale for seconds, _ in self._windows),
            "communication_ms": estimate(seconds * scale for _, seconds in self._windows),
        }
