"""The example that a user starts, `examples.mnist`, beside the loop of the same engine that the benchmark measures."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.peers.worker import LR
from benchmarks.workers import run_to_end

#: Steps at least, so that those that try overlap, and the first ones, hardly count.
_LEAST_STEPS = 300


class Example:
    """Runs of `python -m examples.mnist` with plain SGD, as all systems of the benchmark train."""

    name = "python -m examples.mnist"

    def __init__(self, model: str, data: str, ranks: int, batch: int, window_s: float):
        self._ranks, self._batch, self._window_s = ranks, batch, window_s
        self._arguments = [
            "-m", "examples.mnist", "--model", model, "--data", data, "--batch-size", str(batch),
            "--lr", str(LR), "--momentum", "0", "--schedule", "constant", "--epochs", "1000", "--no-eval", "--quiet",
        ]  # fmt: skip
        self._steps = _LEAST_STEPS

    def images_per_s(self) -> float:
        """Run it, and return the images/s that it reports; the first run sets the steps that fill a window."""
        with tempfile.TemporaryDirectory(prefix="clcomm-bench-") as folder:
            path = Path(folder, "report.json")
            run_to_end(self._ranks, *self._arguments, "--max-steps", str(self._steps), "--report", str(path))
            speed = json.loads(path.read_text(encoding="utf-8"))["images_per_s"]
        self._steps = harness.repeats_for(self._ranks * self._batch / speed, self._window_s, _LEAST_STEPS)
        return speed
