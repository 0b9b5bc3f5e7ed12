"""The interface of a measured system, and the worker that runs it for the parent."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.peers.batches import Batch, read_batches
from benchmarks.workers import serve

#: Learning rate of every system's plain SGD: small, so that values stay finite in a long window.
LR = 0.01
_SETTLING_STEPS = 3


class Stepping(Protocol):
    """One rank's model, synchronisation and optimizer, and its batches in the system's own form."""

    def step(self, number: int) -> None:
        """Forward, backward, synchronisation and update on batch `number`; may leave work queued."""

    def finish(self) -> dict[str, Any]:
        """Wait until all work is done and return the last step's {"loss": ...}, and other figures."""


class TrainingSystem(Stepping, Protocol):
    """What trains plain SGD, in windows that begin alike."""

    def configure(self, settings: dict[str, Any]) -> None:
        """Apply the settings of a window, such as PyTorch's threads."""

    def reset(self) -> None:
        """Restore the initial parameters."""


def options() -> argparse.Namespace:
    """Return the worker's options from the parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--model", choices=("convnet", "mlp"), required=True)
    parser.add_argument("--batches", required=True)
    parser.add_argument("--shape", type=int, nargs=3, required=True)
    parser.add_argument("--sharded", action="store_true", help="this project's sharded update")
    parser.add_argument("--device", help="this project's device")
    return parser.parse_args()


def work(given: argparse.Namespace, rank: int, make: Callable[[list[Batch]], TrainingSystem]) -> None:
    """Build the system and run windows of it until the parent closes the connection."""
    batches = read_batches(given.batches, rank)
    system = make(batches)

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        system.configure(request["settings"])
        system.reset()
        return run_window(system, len(batches), request["steps"])

    serve(given.directory, rank, handle)


def run_window(system: Stepping, batches: int, steps: int, settling: int = _SETTLING_STEPS) -> dict[str, Any]:
    """Run `settling` steps, which synchronise the ranks, then `steps` timed ones.

    The times are those of the system's monotonic clock, which processes of one host share.
    """
    numbers = itertools.cycle(range(batches))
    for _ in range(settling):
        system.step(next(numbers))
    system.finish()
    start = time.monotonic()
    for _ in range(steps):
        system.step(next(numbers))
    outcome = system.finish()
    return {"start": start, "stop": time.monotonic(), **outcome}
