"""The steps of a program: its phases "step", else from one averaging of the gradients to the next."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from clcomm.comm.stats.events import Phase, Row

STEP, DATA = "step", "data"
#: Steps at the start of a run that no mean counts, if there are more; of fewer the first alone. See docs/reports.md.
WARM_UP_STEPS = 10
_FEWEST_STEPS, _MOST_WINDOWS = 4, 64


class Steps:
    """Sums of a rank's steps, its stats at the end of the first ones, and means of windows of those after them.

    At 64 windows neighbours are merged, so that memory stays bounded. Neighbouring steps are correlated, windows of
    many steps hardly at all, so that intervals over windows are valid.

    Attributes:
        count, training_s, data_wait_s: of all steps, and of all phases "data".
        cold: these sums and the stats after the first step, later after the first 10; None before.
    """

    def __init__(self) -> None:
        self.data_wait_s, self._has_phases = 0.0, False
        self._start_over()

    def _start_over(self) -> None:
        self.count, self.training_s = 0, 0.0
        self.cold: Row | None = None
        self._windows: list[tuple[float, float]] = []  # seconds of all steps, and of communication, of each window
        self._size = _FEWEST_STEPS
        self._open = 0, 0.0, 0.0  # steps, seconds and communication of the window being filled
        self._ended_s, self._communicated_s = perf_counter(), 0.0

    def add(self, phase: Phase, stats: Callable[[], Row]) -> None:
        """Add a step, or a wait for data; `stats` returns those so far."""
        if phase.name == DATA:
            self.data_wait_s += phase.seconds
            return
        if not self._has_phases:  # an averaging within the first one has counted
            self._has_phases = True
            self._start_over()
        self._count(phase.seconds, phase.communication_s, stats)

    def averaged(self, communicated_s: float, stats: Callable[[], Row]) -> None:
        """End a step of a program without phases "step"; `communicated_s` are the seconds of communication so far."""
        if not self._has_phases:
            seconds = perf_counter() - self._ended_s
            self._count(seconds, min(seconds, communicated_s - self._communicated_s), stats)
            self._ended_s, self._communicated_s = self._ended_s + seconds, communicated_s

    def _count(self, step_s: float, communication_s: float, stats: Callable[[], Row]) -> None:
        self.count, self.training_s = self.count + 1, self.training_s + step_s
        if self.count in (1, WARM_UP_STEPS):
            self.cold = {**self.sums(), "stats": stats()}
        if self.count <= WARM_UP_STEPS:
            return
        steps, seconds, communicated_s = self._open
        self._open = steps, seconds, communicated_s = (
            steps + 1, seconds + step_s, communicated_s + communication_s
        )  # fmt: skip
        if steps == self._size:
            self._windows.append((seconds, communicated_s))
            self._open = (0, 0.0, 0.0)
            if len(self._windows) == _MOST_WINDOWS:
                pairs = zip(self._windows[::2], self._windows[1::2], strict=True)
                self._windows = [(a + c, b + d) for (a, b), (c, d) in pairs]
                self._size *= 2

    def sums(self) -> Row:
        """Return the sums under their names in a rank's record."""
        return {"steps": self.count, "training_s": self.training_s, "data_wait_s": self.data_wait_s}

    def windows(self) -> Row:
        """Return the mean ms of a step in each whole window, and of its communication, under their names."""
        columns = zip(*self._windows, strict=True) if self._windows else ((), ())
        names = "step_ms", "communication_ms"
        return {name: [1e3 * s / self._size for s in column] for name, column in zip(names, columns, strict=True)}
