"""What both sides train, and the events that their ranks write down.

A step has `SHARDS` batches that follow from its number, so that the same samples are due in it whatever came before. It
takes at least as long as it is told to, as that of a larger model, without the cores that the ranks to come need.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

#: Batches of a step, samples of one, and of a step.
SHARDS, SAMPLES = 8, 8
STEP_SAMPLES = SHARDS * SAMPLES
_INPUTS, _WIDTH, _CLASSES = 784, 256, 10
#: Events: a rank can take steps from now on; it has taken one; it has taken all, with the hash of its state.
BEGINS, STEP, ENDS = "begins", "step", "ends"
EVENTS = "events"


class Task(NamedTuple):
    """The arguments of a rank: the directory of the events, the steps, and the least seconds of one."""

    folder: Path
    steps: int
    step_s: float

    @classmethod
    def given(cls) -> Task:
        """Return this process's, which computes in one thread."""
        torch.set_num_threads(1)
        return cls(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

    def words(self) -> list[str]:
        return [str(self.folder), str(self.steps), f"{self.step_s:g}"]

    def compute_since(self, before_s: float) -> float:
        """Wait, as a step that computes, until its time has passed since the one before; return when that was."""
        time.sleep(max(0.0, before_s + self.step_s - time.monotonic()))
        return time.monotonic()


class Event(NamedTuple):
    """What a rank wrote: when (time.monotonic()), its rank, process, steps so far, samples of the step, and a hash."""

    at_s: float
    rank: int
    process: int
    what: str
    step: int
    samples: int
    digest: str


class Events:
    """The events of one rank."""

    def __init__(self, task: Task, rank: int):
        self._file = os.open(task.folder / EVENTS, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._rank = rank

    def note(self, what: str, step: int, samples: int = 0, digest: str = "-") -> None:
        line = f"{time.monotonic():.6f} {self._rank} {os.getpid()} {what} {step} {samples} {digest}\n"
        os.write(self._file, line.encode())


class Written:
    """The events of all ranks, read as their file grows.

    Attributes:
        events: those so far, in the file's order.
        counts: how many there are of each kind.
        stepping: by rank, the process that took its newest step.
    """

    def __init__(self, folder: Path):
        self._path, self._read = folder / EVENTS, 0
        self.events: list[Event] = []
        self.counts = Counter[str]()
        self.stepping: dict[int, int] = {}

    def look(self) -> Written:
        """Read what was written since the last look; return this object."""
        if not self._path.exists():
            return self
        with open(self._path, "rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # a reader may see half a line
        self._read += len(whole)
        for line in whole.decode().splitlines():
            at, rank, pid, what, step, samples, digest = line.split()
            event = Event(float(at), int(rank), int(pid), what, int(step), int(samples), digest)
            self.events.append(event)
            self.counts[what] += 1
            if what == STEP:
                self.stepping[event.rank] = event.process
        return self


def network() -> nn.Module:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    hidden = [nn.Linear(_INPUTS, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(_WIDTH, _CLASSES))


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def batch(step: int, shards: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of these shards in a step."""
    drawn = [np.random.default_rng([step, shard]) for shard in shards]
    inputs = np.concatenate([each.standard_normal((SAMPLES, _INPUTS), np.float32) for each in drawn])
    return torch.from_numpy(inputs), torch.from_numpy(inputs[:, :_CLASSES].argmax(1))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Return a copy of the parameters and of Adam's state."""
    arrays = {f"parameter/{name}": tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        arrays |= {f"{name}/{number}": tensor.numpy().copy() for name, tensor in values.items()}
    return arrays


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the hash of parameters and Adam's state."""
    state = state_of(model, optimizer)
    return hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()
