"""Trainers of small models, and what tests ask of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.sync.balance import Balancer
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from clcomm.sync.sampler import BalancedSampler, DistributedSampler
from clcomm.sync.synchronizer import Synchronizer
from tests.helpers import cpu_device
from training.data.datasets import ArrayDataset, load_synthetic
from training.data.loader import Loader
from training.engines.parts import build_parts
from training.metrics import StepRecord
from training.random_state import random_state
from training.schedules import parse_schedule
from training.trainer import Callback, Trainer
from training.trainer_state import state_of

State = dict[str, np.ndarray]


@dataclass
class Watcher(Callback):
    """A callback that keeps what it is told."""

    records: list[StepRecord] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step_finished(self, record: StepRecord) -> None:
        self.records.append(record)

    def epoch_finished(self, epoch: int, train_loss: float) -> None:
        self.losses.append(train_loss)


def data(samples: int) -> ArrayDataset:
    return load_synthetic(samples, 16, shape=(1, 8, 8)).train


def make_trainer(
    comm: Communicator,
    samples: int = 480,
    batch: int = 4,
    model: str = "mlp",
    optimizer: str = "sgd",
    accumulation: int = 1,
    sharded: bool = False,
    clip_norm: float | None = None,
    pad: bool = True,
    balancer: Balancer | None = None,
    prefetch: int = 0,
    **sync_options: object,
) -> Trainer:
    dataset = data(samples)
    parts = build_parts("native", model, dataset.image_shape, dataset.classes, seed=3, device=cpu_device("cpu"))
    sampler = DistributedSampler(samples, comm.rank, comm.size, seed=5, pad=pad)
    if balancer is not None:
        sampler = BalancedSampler(samples, comm.rank, comm.size, balancer.shares, seed=5)
    loader = Loader(dataset, sampler, batch, prefetch=prefetch, held=accumulation)
    chosen = parts.make_optimizer(optimizer, 0.02 if optimizer == "sgd" else 1e-3, momentum=0.9)
    sync = Synchronizer(comm, **sync_options)  # type: ignore[arg-type]
    chosen = DistributedOptimizer(chosen, sync) if sharded else chosen
    trainer = Trainer(
        comm, sync, parts, chosen, loader, accumulation=accumulation, clip_norm=clip_norm, balancer=balancer,
        callbacks=[Watcher()],
    )  # fmt: skip
    trainer.schedule = parse_schedule("cosine:warmup=3", 100)
    return trainer


def train(trainer: Trainer, steps: int) -> State:
    for _ in trainer.train(epochs=10**6, max_steps=steps):
        pass
    return trainer.model.state_dict()


def epochs_of(trainer: Trainer, epochs: int) -> tuple[State, int]:
    """Train whole epochs, and return the parameters and the number of steps."""
    steps = sum(1 for _ in trainer.train(epochs))
    return trainer.model.state_dict(), steps


def everything_of(trainer: Trainer) -> str:
    """Return all that a checkpoint would set."""
    arrays = trainer.model.state_dict() | trainer.optimizer.state_dict() | random_state()
    return str((state_of(trainer), {name: array.tobytes() for name, array in arrays.items()}))


def assert_same_bits(first: State, second: State) -> None:
    assert list(first) == list(second)
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


def relative_difference(first: State, second: State) -> float:
    a, b = (np.concatenate([state[name].ravel() for name in first]).astype(np.float64) for state in (first, second))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def solo() -> Communicator:
    return Communicator(transport="solo")
