"""Steps of a run again, in one process: from the checkpoint before them, with every rank's gradients in turn.

A run of N ranks is one of N logical shards, a shard a rank: the same samples, random numbers and order of sums
(docs/summation-order.md), so the bits are the same in one process. `training/replay.py` is the command; a checkpoint
names the classes of its run's session and options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.comm.communicator import Communicator
from training.checkpoints import job_of
from training.console import Silent
from training.options import TrainingOptions
from training.session import Session
from training.snapshot import restore_snapshot
from training.step_values import StepValues, Value

_Kind = TypeVar("_Kind")
#: Options that a run has had, and a replay leaves out, as they change no bit of a step.
_LEFT_OUT: dict[str, Any] = {
    "checkpoint_every": None, "target_accuracy": None, "elastic": False, "overlap": "off", "zero": 0,
    "sharded_optimizer": False, "check_replicas": 0, "audit_every": 0, "eval": False, "quiet": True,
    "balance": "off",
}  # fmt: skip


def replayed(
    facts: dict[str, Any], source: Path | None, first: int, last: int
) -> Iterator[tuple[int, dict[Value, np.ndarray]]]:
    """Yield the number and the values of steps `first` to `last` of a run.

    Args:
        facts: those of a checkpoint of the run.
        source: the checkpoint to begin from; None: the run's start.

    Raises ArgumentError for a step after the run's end and a run that cannot be computed in one process,
    CheckpointError for other data or another device than the run had, and where its classes are not found.
    """
    program, ranks = facts["program"], int(facts["world_size"])
    settings = program["settings"]
    kind = _named(program["options"], TrainingOptions)
    try:
        original = kind(**{**settings, "checkpoint_every": None, "target_accuracy": None})
    except TypeError:
        raise CheckpointError(f"replay: expected the options of {program['options']}, found others") from None
    session = _session(program, original, ranks)
    trainer, parts = session.trainer, session.parts
    if _computes_as(parts.device) != _computes_as(program["device"]):
        raise CheckpointError(f"replay: expected the run's device, {program['device']}, got {parts.device}")
    if not first <= last <= session.total_steps:
        raise ArgumentError(f"--step: expected 1 to {session.total_steps}, the run's steps, got {last}")
    if source is not None:
        restore_snapshot(source, trainer, job_of(original, session.splits.name))
    steps = session.steps()
    for step in range(trainer.progress.step + 1, last + 1):
        values = trainer.values = StepValues(parts) if step >= first else None
        next(steps)
        if values is not None:
            values.keep_parameters()
            yield step, values.arrays
    trainer.values = None


def _computes_as(device: str) -> str:
    """Return a device's name without that of PoCL's threads, with all of which it computes the same bits."""
    return re.sub(r"\b(basic|pthread)-", "", device)


def _session(program: dict[str, Any], original: TrainingOptions, ranks: int) -> Session:
    """Return the run's session on this process alone, with a logical shard for each rank."""
    settings, given = program["settings"], original.logical_shards
    hosts = program["hosts"]
    if not given and 1 < hosts < ranks and settings["transport"] != "mpi":
        raise ArgumentError(
            f"replay: expected a run with --logical-shards or on one host, got {ranks} ranks on {hosts} hosts, whose "
            f"sums are made host by host"
        )
    if not given and settings["elastic"] and program["began"]:
        raise ArgumentError("replay: expected --logical-shards in a run that went on without some of its ranks")
    if not given and original.balance == "auto":
        raise ArgumentError("replay: expected --logical-shards in a run with --balance auto, which weighs gradients")
    try:
        options = replace(original, logical_shards=given or ranks, **_LEFT_OUT)
    except ArgumentError as error:
        raise ArgumentError(f"replay: a run in one process has a logical shard for each rank; {error}") from None
    kind = _named(program["session"], Session)
    return kind(options, comm=Communicator(transport="solo"), console=cast("Any", Silent()))


def _named(name: str, base: type[_Kind]) -> type[_Kind]:
    """Return the class that a checkpoint names "module:class"; CheckpointError unless it is there and a `base`."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute, None)
    except ImportError:
        found = None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise CheckpointError(
            f"replay: expected the run's {name}, found none in {Path.cwd()} or installed; replay where the run started"
        )
    return found
