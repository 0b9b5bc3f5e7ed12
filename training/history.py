"""The steps of a run, in bounded memory: loss, step time and communication time."""

from __future__ import annotations

from typing import Any

from training.metrics import StepRecord
from training.trainer import Callback

_MOST_POINTS = 256
_NAMES = ("loss", "step_ms", "communication_ms")


class StepHistory(Callback):
    """A callback that keeps a rank's steps as points, each the mean of equally many consecutive steps.

    At 256 points neighbours are merged, so that memory stays bounded.
    """

    every_step = False

    def __init__(self) -> None:
        self._points: list[list[float]] = []  # each is the sums over its steps
        self._steps_a_point = 1
        self._open, self._count = [0.0] * len(_NAMES), 0  # the sums and the number of steps since the last point
        self._first_step = 0

    def step_finished(self, record: StepRecord) -> None:
        self._first_step = self._first_step or record.step
        values = record.loss, record.seconds * 1e3, record.communication_s * 1e3
        self._open, self._count = [a + b for a, b in zip(self._open, values, strict=True)], self._count + 1
        if self._count == self._steps_a_point:
            self._points.append(self._open)
            self._open, self._count = [0.0] * len(_NAMES), 0
            if len(self._points) == _MOST_POINTS:
                pairs = zip(self._points[::2], self._points[1::2], strict=True)
                self._points = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
                self._steps_a_point *= 2

    def as_dict(self) -> dict[str, Any] | None:
        """Return the points as in docs/reports.md; None before the first. Steps after the last one are not in it."""
        if not self._points:
            return None
        columns = zip(*self._points, strict=True)
        means = {
            name: [value / self._steps_a_point for value in column]
            for name, column in zip(_NAMES, columns, strict=True)
        }
        return {"first_step": self._first_step, "steps_a_point": self._steps_a_point, **means}
