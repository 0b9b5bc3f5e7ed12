"""Everything a run needs to go on where it stopped, bit for bit, as a checkpoint."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np

from clcomm.checkpoint import Checkpoint, check_parameters
from clcomm.checkpoint_series import CheckpointSeries, load_newest
from clcomm.errors import CheckpointError
from clcomm.layout import ParameterSpec
from training.trainer import Trainer

_log = logging.getLogger("clcomm")


def save_snapshot(series: CheckpointSeries, trainer: Trainer, job: dict[str, Any]) -> None:
    """Write the trainer's state and what the job was told, from rank 0, after comparing the replicas; collective."""
    comm = trainer.comm
    trainer.sync.check_replicas(trainer.model)
    random_states = comm.gather(_random_state())
    optimizer_state = trainer.optimizer.state_dict()  # on every rank: each may hold a part of it
    sync_states = {name: comm.gather(own) for name, own in trainer.sync.state_dict(trainer.model).items()}
    checkpoint = None
    if comm.rank == 0:
        checkpoint = Checkpoint(facts={"job": job, "training": trainer.state(), "world_size": comm.size})
        checkpoint.add_group("parameter", trainer.model.state_dict())
        checkpoint.add_group("optimizer", optimizer_state)
        assert random_states is not None
        checkpoint.add_group("random", {str(rank): state for rank, state in enumerate(random_states)})
        for name, states in sync_states.items():
            checkpoint.add_group("sync", {f"{rank}/{name}": state for rank, state in enumerate(states or ())})
    series.save(checkpoint)


def restore_snapshot(path: str | os.PathLike, trainer: Trainer, job: dict[str, Any]) -> Path:
    """Put the trainer where the newest whole checkpoint at `path` was written, and return which file that was.

    Collective. Raises CheckpointError, on every rank, if there is none or it is another job's.
    """
    source, checkpoint = load_newest(trainer.comm, path)
    parameters = checkpoint.group("parameter")
    check_parameters(parameters, _specs(trainer.model))
    _check_job(checkpoint.facts.get("job"), job)
    trainer.model.load_state_dict(parameters)
    trainer.optimizer.load_state_dict(checkpoint.group("optimizer"))
    trainer.load_state(checkpoint.facts.get("training", {}))
    if checkpoint.facts.get("world_size") == trainer.comm.size:
        _restore_random_state(checkpoint.group("random").get(str(trainer.comm.rank)))
        trainer.sync.load_state_dict(trainer.model, checkpoint.group(f"sync/{trainer.comm.rank}"))
    elif trainer.comm.rank == 0 and checkpoint.group("sync"):
        _log.warning(
            "checkpoint: was written by %s ranks, this job has %d: what compression held back is left out",
            checkpoint.facts.get("world_size"),
            trainer.comm.size,
        )
    trainer.sync.check_replicas(trainer.model)
    return source


def _specs(model: Any) -> list[ParameterSpec]:
    return [ParameterSpec(name, array.shape, str(array.dtype)) for name, array in model.state_dict().items()]


def _check_job(theirs: Any, ours: dict[str, Any]) -> None:
    """Refuse to go on with other settings than those that decide the course of the training."""
    if not isinstance(theirs, dict):
        raise CheckpointError("checkpoint: expected what the job was told, found nothing")
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise CheckpointError(
                f"checkpoint: was written with --{name.replace('_', '-')} {theirs.get(name)}, this job has {value}; "
                f"resume with the same settings"
            )


def _random_state() -> np.ndarray:
    """Return the states of Python's and NumPy's global generators, 625 + 625 uint32 words."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    python = random.getstate()[1]
    return np.concatenate([np.array(python, np.uint32), np.asarray(keys, np.uint32), np.array([position], np.uint32)])


def _restore_random_state(state: np.ndarray | None) -> None:
    if state is None or state.shape != (1250,):
        raise CheckpointError("checkpoint: holds no random state for this rank")
    random.setstate((3, tuple(int(word) for word in state[:625]), None))
    np.random.set_state(("MT19937", state[625:1249], int(state[1249]), 0, 0.0))
