"""Follows one rank's training by what the hooks report, and writes its record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.base.console.finding import Finding, problem
from clcomm.tools.verify.record import (
    BACKWARD,
    CLIP,
    FORWARD,
    STEP,
    SYNC,
    Batch,
    Hashes,
    RankRecord,
    Step,
    hash_of,
    sketch_of,
)


class Finished(BaseException):
    """Ends the script, which has taken the steps that were asked for; no Exception, which it might handle."""


class Watcher:
    """Collects a rank's steps.

    Args:
        rank: of this process.
        steps: after how many steps of each optimizer the script is ended.
        folder: where the record is written.
        finish: called after the last step.
    """

    def __init__(self, rank: int, steps: int, folder: Path, finish: Callable[[], None]):
        self.record = RankRecord(rank)
        self._most, self._folder, self._finish = steps, folder, finish
        self._step = Step()
        self._names: dict[int, str] = {}
        self._parameters: dict[int, Any] = {}  # kept alive, as identities are keys
        self._local: dict[int, np.ndarray] = {}
        self._carried: set[int] = set()
        self._clipped: dict[int, np.ndarray] = {}
        self._optimizers: dict[int, Any] = {}
        self._depth = 0

    def is_new(self, parameter: object) -> bool:
        """Return whether a parameter is seen for the first time, and note it."""
        is_new = id(parameter) not in self._parameters
        self._parameters[id(parameter)] = parameter
        return is_new

    def enter(self) -> None:
        """Note that the program calls a model in training, which may communicate before its forward."""
        self._step.events.append(FORWARD)
        self.note()

    def forward(
        self, named: Iterable[tuple[str, Any]], buffers: Mapping[str, np.ndarray], inputs: list[np.ndarray],
        value: Callable[[Any], np.ndarray],
    ) -> None:  # fmt: skip
        """Note a model's forward in training.

        Args:
            named: its parameters.
            buffers: their values before it.
            inputs: the batch.
            value: returns a parameter's values.
        """
        for name, parameter in named:
            if id(parameter) not in self._names:
                values = value(parameter)
                taken = set(self._names.values())
                name = next(each for each in (name, *(f"{name} ({n})" for n in range(2, 1000))) if each not in taken)
                self._names[id(parameter)] = name
                self._parameters[id(parameter)] = parameter
                self.record.start[name], self.record.sizes[name] = hash_of(values), values.size
        if inputs:
            self._step.batches.append(Batch.of(inputs))
        self._step.buffers = {name: hash_of(values) for name, values in buffers.items()}
        self.note()

    def gradient(self, parameter: object, before: np.ndarray | None, increment: np.ndarray) -> None:
        """Note that backward adds an increment to a gradient, which was `before`."""
        key = id(parameter)
        if before is None or not before.any():
            self._local.pop(key, None)  # cleared since
            self._carried.discard(key)
        elif key not in self._local:
            self._carried.add(key)
            self._local[key] = sketch_of(before)
        self._local[key] = self._local.get(key, 0.0) + sketch_of(increment)

    def accumulated(self, parameter: object, gradient: np.ndarray) -> None:
        """Note a parameter's whole gradient of its own, at the end of a backward."""
        self._local[id(parameter)] = sketch_of(gradient)

    def carry(self, parameter: object) -> None:
        """Note that a gradient of an earlier step is there as backward begins."""
        if id(parameter) not in self._local:
            self._carried.add(id(parameter))

    def clear(self, parameter: object) -> None:
        """Note that there is no gradient as backward begins."""
        self._local.pop(id(parameter), None)
        self._carried.discard(id(parameter))

    def backward(self, factor: float = 1.0) -> None:
        self._step.events.append(BACKWARD)
        self._step.factor = factor

    def synchronised(self) -> None:
        """Note a synchronisation that the program calls."""
        self._step.events.append(SYNC)
        if BACKWARD not in self._step.events and len(self.record.steps):
            self.record.steps[-1].events.append(SYNC)  # after the step
        self.note()

    def clipping(self, gradients: Iterable[tuple[Any, np.ndarray]]) -> None:
        """Note gradients that are about to be clipped."""
        if CLIP not in self._step.events:
            self._clipped = {id(parameter): sketch_of(gradient) for parameter, gradient in gradients}
        self._step.events.append(CLIP)

    def step_begins(
        self, optimizer: object, values: Iterable[tuple[Any, np.ndarray]], gradients: Iterable[tuple[Any, np.ndarray]],
        options: Mapping[str, object], state: Callable[[], Iterable[tuple[Any, np.ndarray]]],
    ) -> None:  # fmt: skip
        """Note an optimizer's parameters, gradients, options and, in its first step, its state before it."""
        self._depth += 1
        if self._depth > 1:  # an optimizer within another
            return
        step, is_first = self._step, id(optimizer) not in self._optimizers
        self._optimizers[id(optimizer)] = optimizer
        step.optimizer = list(self._optimizers).index(id(optimizer))
        values = list(values)
        own = [id(parameter) for parameter, _ in values]
        step.before = self._hashes(values)
        step.seen = {self._name(parameter): sketch_of(gradient) for parameter, gradient in gradients}
        step.options = dict(options)
        step.state = self._hashes(state()) if is_first else {}
        step.local = {self._name_of(key): self._local.pop(key) for key in own if key in self._local}
        step.clipped = {self._name_of(key): self._clipped[key] for key in own if key in self._clipped}
        step.carried = [self._name_of(key) for key in own if key in self._carried]
        self._carried.difference_update(own)
        self._clipped = {}
        step.events.append(STEP)
        self.record.steps.append(step)
        self.note()

    def step_ends(self, values: Iterable[tuple[Any, np.ndarray]]) -> None:
        """Note an optimizer's parameters after its step; ends the script after the last one."""
        self._depth -= 1
        if self._depth:
            return
        step = self._step
        step.after, step.is_complete, self._step = self._hashes(values), True, Step()
        if len(self.record.steps) >= self._most * len(self._optimizers):
            self.record.ended = "steps"
            self.write()
            self._finish()
        self.write()

    def refuse(self, why: str) -> None:
        """Note why this script cannot be judged."""
        self.record.refusal = why

    def note(self) -> None:
        """Note that this rank has gone on."""
        self.record.write_progress(self._folder)

    def write(self) -> None:
        """Write the record."""
        self.record.write(self._folder)
        self.note()

    def write_pending(self, ended: str = "", error: str = "") -> None:
        """Write the record with what has happened since the last step."""
        step = self._step
        if not self.record.ended and (not self.record.steps or self.record.steps[-1] is not step):
            step.local = {self._name_of(key): each for key, each in list(self._local.items())}
            if step.local or step.batches or step.events:
                self.record.steps.append(step)
        if not self.record.ended:
            self.record.ended, self.record.error = ended, error
        self.write()

    def _hashes(self, values: Iterable[tuple[Any, np.ndarray]]) -> Hashes:
        return {self._name(parameter): hash_of(array) for parameter, array in values}

    def _name(self, parameter: object) -> str:
        return parameter if isinstance(parameter, str) else self._name_of(id(parameter))

    def _name_of(self, key: int) -> str:
        return self._names.get(key) or f"parameter {list(self._parameters).index(key)}"


# --- The mistakes that `clcomm verify` knows, each with the question that it answers and the remedy. ---

#: By cause: the question that it answers, and what to do.
_SYNCHRONISE = "synchronise them between backward and the optimizer's step"
CAUSES = {
    "model": ("model", "build the same model on every rank"),
    "start": ("start", "call broadcast_parameters, wrap the model in DistributedDataParallel, or seed all ranks alike"),
    "options": ("optimizer", "give every rank the same options and schedule"),
    "state": ("optimizer", "load the checkpoint on every rank, or broadcast the state after loading it"),
    "same-data": ("data", "give each rank its shard, as a DistributedSampler does"),
    "overlap": ("data", "shuffle with the same seed on every rank, and take each rank's part of that order"),
    "skipped-step": ("course", "let all ranks take a step or none"),
    "unused": (
        "course",
        "use every parameter on every rank, or set find_unused_parameters in DistributedDataParallel",
    ),
    "zero-grad": ("gradients", "call zero_grad() once between steps"),
    "clip": ("gradients", "synchronise, then clip"),
    "apart": ("gradients", "change gradients alike on every rank after the synchronisation"),
    "left-out": ("gradients", "synchronise every parameter that the optimizer steps"),
    "late-sync": ("gradients", _SYNCHRONISE),
    "no-sync": ("gradients", _SYNCHRONISE),
    "unequal-batches": ("gradients", "give every rank as many samples, or weigh: sync_gradients(model, samples=...)"),
    "weights": ("gradients", "weigh ranks by their samples"),
    "sum": ("gradients", "divide by the number of ranks once"),
    "divided-twice": ("gradients", "divide by the number of ranks once"),
    "replicas": ("parameters", "see that every rank changes them alike"),
    "mismatch": ("end", "see the message"),
    "hang": ("end", "let all ranks call the same collectives"),
}


def wrong(cause: str, what: str, first: str = "") -> Finding:
    """Return the finding of a mistake; first: the first parameter with it."""
    check, remedy = CAUSES[cause]
    return problem(check, what, remedy, cause=cause, first=first)


def by_rank(values: Iterable[tuple[int, object]]) -> str:
    """Return values with their ranks in words."""
    return ", ".join(f"{value} on rank {rank}" for rank, value in values)
