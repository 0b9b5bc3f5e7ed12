"""The state of a Trainer in a checkpoint, checked before it is set, and as it goes on where ranks were lost."""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.comm.communicator import Communicator
from clcomm.jobs.checkpoint import invalid_entry, whole_number
from clcomm.parallel.loss_scaling import GradScaler
from clcomm.sync import elastic
from clcomm.sync.sampler import DistributedSampler, Sampler
from training.trainer import Progress, Trainer

#: The largest count in a checkpoint: the largest int64.
_MOST = (1 << 63) - 1


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return progress, sampler, learning rate and, where losses are scaled, their scale as plain numbers."""
    state = {
        "progress": asdict(trainer.progress), "sampler": trainer.loader.sampler.state_dict(),
        "base_lr": trainer.base_lr,
    }  # fmt: skip
    return {**state, "scaler": trainer.scaler.state_dict()} if trainer.scaler.is_enabled() else state


def load_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Set what `state_of` returned, here or on another number of ranks.

    Raises CheckpointError, before anything is changed, for an invalid state.
    """
    progress = check_state(trainer, state)
    trainer.loader.sampler.load_state_dict(state["sampler"])
    trainer.progress, trainer.base_lr = progress, float(state["base_lr"])
    if trainer.scaler.is_enabled():
        trainer.scaler.load_state_dict(state["scaler"])
    if state["sampler"]["world_size"] != parts_of(trainer):
        _redistribute(trainer, state["sampler"]["world_size"])


def parts_of(trainer: Trainer) -> int:
    """Return into how many parts the samples are divided: logical shards, or ranks."""
    return trainer.comm.size if trainer.sync.shards is None else trainer.sync.shards.count


def check_state(trainer: Trainer, state: Any) -> Progress:
    """Return the progress in a state; raises CheckpointError if it is another run's or an entry is out of bounds."""
    state = _entries("training", state)
    found, theirs = _entries("progress", state.get("progress")), _entries("sampler", state.get("sampler"))
    base_lr = state.get("base_lr")
    if not isinstance(base_lr, (int, float)) or isinstance(base_lr, bool) or not 0 <= base_lr <= sys.float_info.max:
        raise invalid_entry("base_lr", "a finite number from 0 up", base_lr)
    _check_scaler(trainer, state.get("scaler"))
    sampler = copy.copy(trainer.loader.sampler)
    sampler.load_state_dict(theirs)
    ranks = whole_number("sampler.world_size", theirs.get("world_size"), 1, _MOST)
    most = {"epoch": _MOST, "batch": _batches_left(trainer, sampler, ranks), "step": _MOST}
    return Progress(**{name: whole_number(f"progress.{name}", found.get(name), 0, most[name]) for name in most})


def _check_scaler(trainer: Trainer, state: Any) -> None:
    if trainer.scaler.is_enabled():
        try:
            GradScaler(trainer.sync).load_state_dict(_entries("scaler", state))
        except ArgumentError as error:
            raise CheckpointError(f"checkpoint: scaler: {error}; use an earlier checkpoint") from None


def _batches_left(trainer: Trainer, sampler: Sampler, ranks: int) -> int:
    """Return the most batches that one of `ranks` ranks has left in the sampler's epoch."""
    share = sampler.longest_shard
    if ranks != parts_of(trainer):
        assert isinstance(sampler, DistributedSampler)  # other samplers refuse another number of ranks
        share = -(-(sampler.length - sampler.done) // ranks)
    return -(-share // trainer.loader.batch_size)


def _redistribute(trainer: Trainer, ranks: int) -> None:
    """Distribute what `ranks` ranks have left of the epoch over this job's ranks."""
    progress, sampler = trainer.progress, trainer.loader.sampler
    assert isinstance(sampler, DistributedSampler)
    done = sampler.done + progress.batch * trainer.loader.batch_size * ranks
    if done >= sampler.length:
        progress.epoch, done = progress.epoch + 1, 0
        sampler.set_epoch(progress.epoch)
    sampler.leave_out(done)
    progress.batch = 0


def _entries(entry: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_entry(entry, "its entries by name", value)
    return value


class MovingState(NamedTuple):
    """What a rank brings along when ranks were lost: all that decides the course of the training.

    It replaces another whole or not at all, as the rank that sends it may be lost meanwhile.

    Attributes:
        model, optimizer: their arrays by name.
        training: see `state_of`.
        policy: what a policy keeps on this rank, its parameters and outer optimizer; empty without one.
        random: the state of the device's random numbers after that step; None: they are the rank's own.
    """

    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    training: dict[str, Any]
    policy: dict[str, np.ndarray]
    random: np.ndarray | None = None

    @classmethod
    def of(cls, trainer: Trainer, random: np.ndarray | None = None) -> MovingState:
        """Return the trainer's state after its last complete step; not collective."""
        sync, model = trainer.sync, trainer.model
        policy = {} if sync.models.settings.policy is None else sync.state_dict(model)
        return cls(model.state_dict(), trainer.optimizer.state_dict(), state_of(trainer), policy, random)

    def newest(self, comm: Communicator) -> MovingState:
        """Return the state of the lowest of the ranks that have completed the most steps; collective."""
        root = elastic.newest(comm, self.training["progress"]["step"])
        kept = {name: (array.shape, array.dtype) for name, array in self.policy.items()}
        training, kept, random = comm.broadcast_object((self.training, kept, self.random), root, label=elastic.RECOVERY)
        # On a rank that was interrupted in its first step a policy may not have begun.
        policy = {name: self.policy.get(name, np.zeros(*kind)) for name, kind in kept.items()}
        return MovingState(
            elastic.send_arrays(comm, self.model, root),
            elastic.send_arrays(comm, self.optimizer, root),
            training,
            elastic.send_arrays(comm, policy, root),
            random,
        )
