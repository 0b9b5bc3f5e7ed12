"""What the worker of either system does for the parent: windows of steps that are timed, a course, and its test."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.networks.workload import Workload, batches_of, read
from benchmarks.peers.batches import Batch
from benchmarks.peers.worker import Stepping, run_window
from benchmarks.workers import serve

_SETTLING_STEPS = 1  # long ones


class System(Stepping, Protocol):
    """One rank's network, which also predicts."""

    def logits(self, inputs: np.ndarray) -> np.ndarray:
        """Return what the network, in evaluation, has for a batch."""


def options() -> argparse.Namespace:
    """Return the worker's options from the parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    return parser.parse_args()


def work(given: argparse.Namespace, rank: int, make: Callable[[Workload, list[Batch]], System]) -> None:
    """Build the system and answer the parent's requests."""
    batches = batches_of(given.folder, f"train{rank}", given.batch)
    system, taken = make(read(given.folder), batches), 0

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal taken
        if request.get("test"):
            return tested(system.logits, batches_of(given.folder, "test", given.batch))
        if not request.get("course"):
            return run_window(system, len(batches), request["steps"], _SETTLING_STEPS)
        for number in range(taken, taken + request["steps"]):
            system.step(number)
        taken += request["steps"]
        return system.finish()

    serve(given.directory, rank, handle)


def tested(logits: Callable[[np.ndarray], np.ndarray], batches: list[Batch]) -> dict[str, float]:
    """Return the mean cross-entropy in float64, and the share of labels with the largest logit."""
    losses, correct, count = 0.0, 0, 0
    for inputs, labels in batches:
        found = logits(inputs).astype(np.float64).reshape(labels.size, -1)
        flat = labels.reshape(-1)
        shifted = found - found.max(1, keepdims=True)
        chosen = shifted[np.arange(flat.size), flat]
        losses += float((np.log(np.exp(shifted).sum(1)) - chosen).sum())
        correct += int((found.argmax(1) == flat).sum())
        count += flat.size
    return {"loss": losses / count, "accuracy": correct / count}
