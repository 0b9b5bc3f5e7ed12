"""The whole state of a run as a checkpoint, from which it goes on bit for bit."""

from __future__ import annotations

import logging
import math
import os
import reprlib
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.comm.communicator import Communicator
from clcomm.jobs.checkpoint import Checkpoint, check_parameters, invalid_entry, whole_number
from clcomm.jobs.checkpoint.memory import CHECKPOINT
from clcomm.sync import compression_state
from training.checkpoint_series import CheckpointSeries, load_newest
from training.random_state import PARTS, check_random_state, continue_stream, random_state, restore_random_state
from training.trainer import Trainer
from training.trainer_state import check_state, load_state, parts_of, state_of

_log = logging.getLogger("clcomm")
#: The value of --policy without one.
NO_POLICY = "none"
#: Settings that older checkpoints lack, as they were then.
_BEFORE = {"precision": "float32", "loss_scaling": False, "dropout": 0.0}


def save_snapshot(
    series: CheckpointSeries, trainer: Trainer, job: dict[str, Any], program: dict[str, Any] | None = None
) -> None:
    """Write the trainer's state and the job's settings, from rank 0, after comparing the replicas; collective.

    program: what a replay needs; None: the run cannot be replayed.
    """
    trainer.sync.check_replicas(trainer.model)
    series.save(snapshot_of(trainer, job, program))


def snapshot_of(trainer: Trainer, job: dict[str, Any], program: dict[str, Any] | None = None) -> Checkpoint | None:
    """Return the trainer's state and the job's settings on rank 0, None on the others; collective."""
    from clcomm.parallel.tensor_parallel.shards import gathered_state

    comm = trainer.comm
    random_states = comm.gather_object(random_state(trainer.parts.opencl), label=CHECKPOINT)
    pipeline, optimizer = trainer.parts.pipeline, trainer.optimizer
    # Collective: each rank may hold a part.
    optimizer_state = pipeline.optimizer_state_dict(optimizer) if pipeline else gathered_state(optimizer)
    sync_states = _gathered(comm, trainer.sync.state_dict(trainer.model))
    # Under a policy each rank's optimizer has moments of its own.
    optimizers = _gathered(comm, _numbers_of(optimizer_state)) if _has_policy(trainer) else []
    checkpoint, parameters = None, {}
    with trainer.sync.full_parameters(trainer.model):
        if comm.rank == 0:  # with those that divide its layers, or have other stages
            parameters = _arrays(trainer)
    if comm.rank == 0:
        checkpoint = Checkpoint(facts={"job": job, "training": state_of(trainer), "world_size": comm.size})
        if program is not None:
            checkpoint.facts["program"] = program
        checkpoint.add_group("parameter", parameters)
        checkpoint.add_group("optimizer", optimizer_state)
        assert random_states is not None
        for rank, state in enumerate(random_states):
            checkpoint.add_group("random", {_random_name(rank, part): array for part, array in state.items()})
        for rank, sync_state in enumerate(sync_states):
            checkpoint.add_group(f"sync/{rank}", sync_state)
        for rank, state in enumerate(optimizers[1:], 1):
            checkpoint.add_group(f"optimizers/{rank}", state)
    return checkpoint


def _whole(trainer: Trainer) -> Any:
    """Return what has the whole model's `state_dict()`, which stages call together."""
    return trainer.parts.pipeline or trainer.model


def _arrays(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return the whole model's arrays by their first names, shared ones once; stages call together."""
    arrays: dict[str, np.ndarray] = _whole(trainer).state_dict()
    first = {id(array): name for name, array in reversed(arrays.items())}
    return {first[id(array)]: array for array in arrays.values()}


def _has_policy(trainer: Trainer) -> bool:
    return trainer.sync.models.settings.policy is not None


def _numbers_of(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the part of an optimizer's state that can differ between ranks."""
    return {name: array for name, array in state.items() if array.dtype.kind in "iuf"}


def _gathered(comm: Communicator, state: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return every rank's arrays by name on rank 0, an empty list on the others; collective. Some ranks may have none.

    Arrays are gathered one by one as numbers: pickled together they would need twice the memory, and fail from 2 GiB.
    """
    described = {name: (array.shape, array.dtype) for name, array in state.items()}
    everyone = comm.all_gather_object(described, label=CHECKPOINT)
    states: list[dict[str, np.ndarray]] = [{} for _ in everyone] if comm.rank == 0 else []
    for name, (shape, dtype) in {name: kind for theirs in everyone for name, kind in theirs.items()}.items():
        own = state[name] if name in state else np.zeros(shape, dtype)
        arrays = comm.gather(own, label=CHECKPOINT) or []
        for rank, array in enumerate(arrays):
            if name in everyone[rank]:
                states[rank][name] = array
    return states


def restore_snapshot(path: str | os.PathLike[str], trainer: Trainer, job: dict[str, Any]) -> Path:
    """Set the trainer to the newest complete checkpoint at `path`, and return the file; collective.

    Raises CheckpointError, on every rank, if there is none, and as `restore`.
    """
    source, checkpoint = load_newest(trainer.comm, path)
    restore(checkpoint, trainer, job)
    return source


def restore(checkpoint: Checkpoint, trainer: Trainer, job: dict[str, Any]) -> None:
    """Set the trainer to a state that all ranks have; collective.

    Raises CheckpointError, on every rank and before anything is changed, if it belongs to another job, or if an entry
    is out of its bounds.
    """
    from clcomm.parallel.tensor_parallel.shards import divided_state

    parameters = checkpoint.group("parameter")
    own = [ParameterSpec(name, array.shape, str(array.dtype)) for name, array in _arrays(trainer).items()]
    check_parameters(parameters, own)
    _check_job(checkpoint.facts.get("job"), job)
    random_states = _random_states(checkpoint)
    check_state(trainer, checkpoint.facts.get("training"))
    ranks = len(random_states)
    parts = ranks if trainer.sync.shards is None else parts_of(trainer)
    whole_number("sampler.world_size", checkpoint.facts["training"]["sampler"]["world_size"], parts, parts)
    optimizer_state = checkpoint.group("optimizer")
    _check_optimizer(optimizer_state)
    if _has_policy(trainer) and checkpoint.facts["job"].get("policy") != NO_POLICY:
        _check_optimizers(checkpoint, ranks)
        if ranks == trainer.comm.size:
            optimizer_state |= checkpoint.group(f"optimizers/{trainer.comm.rank}")
    _check_compression(checkpoint, trainer, ranks)
    if trainer.parts.pipeline:
        trainer.parts.pipeline.load_optimizer_state_dict(trainer.optimizer, optimizer_state)
    else:
        trainer.optimizer.load_state_dict(divided_state(trainer.optimizer, optimizer_state))
    load_state(trainer, checkpoint.facts["training"])
    _whole(trainer).load_state_dict(parameters)
    if ranks == trainer.comm.size:
        restore_random_state(random_states[trainer.comm.rank], trainer.parts.opencl)
    else:
        continue_stream(random_states[0], trainer.parts.opencl, trainer.comm.rank)
    _restore_compression(checkpoint, trainer, ranks)
    trainer.sync.check_replicas(trainer.model)


def _check_job(theirs: Any, ours: dict[str, Any]) -> None:
    """Raise CheckpointError where settings that decide the course of the training differ.

    A policy may go on from training without one, whose ranks are alike.
    """
    if not isinstance(theirs, dict):
        raise CheckpointError("checkpoint: expected the settings of its job, found none; use another checkpoint")
    for name, value in ours.items():
        found = theirs.get(name, _BEFORE.get(name))
        if found != value and not (name == "policy" and found == NO_POLICY):
            shown = reprlib.repr(found).strip("'")
            raise CheckpointError(
                f"checkpoint: was written with --{name.replace('_', '-')} {shown}, this job has {value}; "
                f"resume with the same settings"
            )


def _check_optimizer(state: dict[str, np.ndarray]) -> None:
    """Raise CheckpointError for an entry that no optimizer writes: one of another type, or out of bounds."""
    for name, array in state.items():
        entry = f"optimizer/{name}"
        if name == "kind":
            if array.dtype.kind != "U" or array.shape != () or not str(array).isprintable():
                raise invalid_entry(entry, "an optimizer's name", array)
            continue
        if name == "names":
            if array.dtype.kind != "U" or array.ndim != 1:
                raise invalid_entry(entry, "the parameters' names", array)
            continue
        if array.dtype.kind not in "biuf":
            raise invalid_entry(entry, "numbers", array)
        is_count = name == "steps" or name.partition("/")[0] == "step"
        is_number = array.shape == () and 0 <= array < math.inf
        if is_count and not (is_number and array == int(array)):
            raise invalid_entry(entry, "a whole number from 0 up", array)
        if array.shape == () and "/" not in name and not is_number:
            raise invalid_entry(entry, "a finite number from 0 up", array)


def _check_optimizers(checkpoint: Checkpoint, ranks: int) -> None:
    """Raise CheckpointError unless a policy's checkpoint has all ranks' numbers; every rank checks those of all."""
    numbers = _numbers_of(checkpoint.group("optimizer"))
    expected = {name: (array.shape, array.dtype) for name, array in numbers.items()}
    for rank in range(1, ranks):
        state = checkpoint.group(f"optimizers/{rank}")
        if {name: (array.shape, array.dtype) for name, array in state.items()} != expected:
            raise CheckpointError(
                f"checkpoint: optimizers/{rank}: expected arrays like those of rank 0's optimizer, got "
                f"{'others' if state else 'none'}; use another checkpoint"
            )
        _check_optimizer(state)


def _check_compression(checkpoint: Checkpoint, trainer: Trainer, ranks: int) -> None:
    """Raise CheckpointError for a state that no compression writes; every rank checks that of all ranks."""
    known, rank = trainer.sync.models, 0
    try:
        for rank in range(ranks):
            state = checkpoint.group(f"sync/{rank}")
            compression_state.check_state(known.hook, known.of(trainer.model).space, state)
    except ArgumentError as error:
        raise CheckpointError(f"checkpoint: sync/{rank}: {error}; use an earlier checkpoint") from None


def _restore_compression(checkpoint: Checkpoint, trainer: Trainer, ranks: int) -> None:
    """Restore what compression kept, if the same ranks keep something now, or a policy on any number; collective."""
    if not checkpoint.group("sync"):
        return
    comm, sync = trainer.comm, trainer.sync
    if _has_policy(trainer):
        source = comm.rank if ranks == comm.size else 0  # others go on from rank 0's parameters and outer optimizer
        sync.load_state_dict(trainer.model, checkpoint.group(f"sync/{source}"))
        return
    holders = [bool(checkpoint.group(f"sync/{rank}")) for rank in range(ranks)]
    if comm.all_gather_object(bool(sync.state_dict(trainer.model)), label=CHECKPOINT) == holders:
        sync.load_state_dict(trainer.model, checkpoint.group(f"sync/{comm.rank}"))
    elif comm.rank == 0:
        written = f"by {ranks} ranks, this job has {comm.size}" if ranks != comm.size else "on other hosts"
        _log.warning("checkpoint: was written %s: what compression kept is left out", written)


def _random_states(checkpoint: Checkpoint) -> list[dict[str, np.ndarray]]:
    """Return the states of the ranks' random generators; every rank checks all of them."""
    found = checkpoint.group("random")
    ranks = sum("/" not in name for name in found)
    whole_number("world_size", checkpoint.facts.get("world_size"), ranks, ranks)
    states = []
    for rank in range(ranks):
        names = {part: _random_name(rank, part) for part in PARTS}
        states.append({part: found[name] for part, name in names.items() if name in found})
        check_random_state(f"random/{rank}", states[-1])
    return states


def _random_name(rank: int, part: str) -> str:
    """Return the entry's name for a part of a rank's random state; the words keep their name of the first release."""
    return str(rank) if part == PARTS[0] else f"{rank}/{part}"
