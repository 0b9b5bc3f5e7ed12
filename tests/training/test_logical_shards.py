"""Runs with --logical-shards: the same hash on any number of ranks, also where a run resumes on another number."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.comm.communicator import Communicator
from clcomm.engine import BatchNorm1d, Device, Dropout, Generator, Linear, Module
from clcomm.engine import functional as F
from clcomm.parallel import SyncBatchNorm
from clcomm.sync import elastic
from clcomm.sync.balance import Balancer
from clcomm.sync.synchronizer import Synchronizer
from tests.shard_steps import drawn_counts, first_ranks
from training import build_trainer
from training.console import make_console
from training.data.datasets import load_synthetic
from training.data.shard_sampler import ShardSampler
from training.engines import parts as parts_module
from training.engines.rehearsal import Rehearsal
from training.options import TrainingOptions
from training.session import Session

SHARDS, STEPS = 4, 9
SPLITS = load_synthetic(103, 50, shape=(1, 8, 8))  # 7 steps an epoch at batch 4, the last one of 2 samples a shard
OPTIONS = TrainingOptions(
    model="mlp", batch_size=4, epochs=2, max_steps=STEPS, device="cpu", quiet=True, logical_shards=SHARDS,
    optimizer="adam", clip_norm=0.5, augment=True,
)  # fmt: skip


class Net(Module):
    """A network with random numbers and running statistics of its own."""

    def __init__(self, in_shape, classes, *, device, seed):
        rng = Generator(seed)
        self.fc1 = Linear(int(np.prod(in_shape)), 12, device=device, rng=rng)
        self.norm, self.drop = BatchNorm1d(12, device=device), Dropout(0.25)
        self.fc2 = Linear(12, classes, device=device, rng=rng)

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.norm(self.fc1(F.flatten(x, 1))))))


@pytest.fixture(autouse=True)
def drops_and_normalises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts_module._KINDS, "mlp", Net)


def ends_with(comm: Communicator, options: TrainingOptions) -> tuple[str, float, float]:
    """Return a run's hash of model and optimizer, its training loss, and its loss on the test set."""
    session = Session(options, comm, SPLITS, make_console(comm))
    result = session.run()
    state = session.parts.model.state_dict() | session.trainer.optimizer.state_dict()
    digest = hashlib.sha256(b"".join(np.asarray(state[name]).tobytes() for name in sorted(state)))
    assert result.evaluation is not None
    return digest.hexdigest(), result.train_loss, result.evaluation.loss


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("accumulation", "zero"), [(1, 0), (3, 0), (3, 1)])
def test_runs_on_any_number_of_ranks_end_alike(auto: Communicator, accumulation: int, zero: int) -> None:
    options = replace(OPTIONS, grad_accumulation=accumulation, max_steps=STEPS if accumulation == 1 else 5)
    expected, options = ends_with(Communicator(transport="solo"), options), replace(options, zero=zero)
    for ranks in range(2, auto.size + 1):
        with first_ranks(auto, ranks) as part:
            assert part is None or ends_with(part, options) == expected, ranks


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_statistics_of_all_shards_are_the_same_on_any_number_of_ranks(
    auto: Communicator, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    options = replace(OPTIONS, grad_accumulation=accumulation, max_steps=STEPS if accumulation == 1 else 5)
    apart = ends_with(Communicator(transport="solo"), options)

    def found(comm: Communicator) -> tuple[str, float, float]:
        def synchronised(*given: Any, device: Device, **named: Any) -> Module:
            model = Net(*given, device=device, **named)
            # Not every rank rehearses a step, in which the others would wait for it.
            return model if isinstance(device, Rehearsal) else SyncBatchNorm.convert_sync_batchnorm(model, comm)

        monkeypatch.setitem(parts_module._KINDS, "mlp", synchronised)
        return ends_with(comm, options)

    expected = found(Communicator(transport="solo"))
    assert expected != apart
    for ranks in range(2, auto.size + 1):
        with first_ranks(auto, ranks) as part:
            assert part is None or found(part) == expected, ranks


class Drawn(Balancer):
    """Takes other shares after every second step, drawn alike on every rank."""

    WARM_UP_STEPS = 0

    def _exchange(self) -> bool:
        self.changes += 1
        counts = drawn_counts(np.random.default_rng(self.changes), self._comm.size, SHARDS)
        self.shares, self._steps = tuple(each * self.batch_size for each in counts), ()
        return True


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_shards_dealt_by_speed_keep_the_bits(
    auto: Communicator, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    options = replace(OPTIONS, grad_accumulation=accumulation, max_steps=STEPS if accumulation == 1 else 5)
    expected = ends_with(Communicator(transport="solo"), options)
    made: list[Drawn] = []

    def drawn(comm: Communicator, batch_size: int, **given: Any) -> Drawn:
        made.append(Drawn(comm, batch_size, window=2, **given))
        return made[-1]

    monkeypatch.setattr(build_trainer, "Balancer", drawn)
    assert ends_with(auto, replace(options, balance="auto")) == expected
    assert made[0].changes > 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stop", [3, 7])
def test_a_run_resumes_on_another_number_of_ranks_with_its_bits(auto: Communicator, tmp_path: Path, stop: int) -> None:
    expected = ends_with(Communicator(transport="solo"), OPTIONS)
    file = auto.broadcast_object(str(tmp_path / "run.npz"))
    with first_ranks(auto, 2) as two:
        if two is not None:
            ends_with(two, replace(OPTIONS, max_steps=stop, checkpoint=file))
    auto.rendezvous()
    found = ends_with(auto if auto.size > 2 else Communicator(transport="solo"), replace(OPTIONS, resume=file))
    assert (found[0], found[2]) == (expected[0], expected[2])  # the training loss is that of the epoch's rest


class DropNet(Net):
    """The same without running statistics."""

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.fc1(F.flatten(x, 1)))))


class LostPeer(Exception):
    pass


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("lost_at", [1, 4, 8])
def test_ranks_that_are_left_end_with_the_undisturbed_bits(
    auto: Communicator, monkeypatch: pytest.MonkeyPatch, lost_at: int
) -> None:
    """The last rank is lost within a step, in which the others have computed some of their shards."""
    monkeypatch.setitem(parts_module._KINDS, "mlp", dropping)
    options = replace(OPTIONS, elastic=True, overlap="off")
    expected = ends_with(Communicator(transport="solo"), options)
    left = auto.split(0 if auto.rank < auto.size - 1 else None)
    monkeypatch.setattr(elastic, "is_lost_peer", lambda error: isinstance(error, LostPeer))
    monkeypatch.setattr(elastic, "survivors_of", lambda comm: left)
    average, calls = Synchronizer.sync_gradients, count(1)

    def lost(self: Synchronizer, model: object, **given: object) -> None:
        if not self.models.is_paused and next(calls) == lost_at and self.comm is auto:
            raise LostPeer
        average(self, model, **given)

    monkeypatch.setattr(Synchronizer, "sync_gradients", lost)
    if left is None:
        with pytest.raises(AttributeError):
            ends_with(auto, options)
    else:
        found = ends_with(auto, options)
        assert (found[0], found[2]) == (expected[0], expected[2])
    auto.rendezvous()


def dropping(in_shape, classes, *, device, seed):
    net = DropNet(in_shape, classes, device=device, seed=seed)
    del net.norm
    return net


def test_elastic_runs_of_models_with_running_statistics_are_refused() -> None:
    with pytest.raises(ArgumentError, match="--elastic: expected a model without running statistics with --logical"):
        ends_with(Communicator(transport="solo"), replace(OPTIONS, elastic=True))


def test_a_run_with_other_shards_does_not_resume(tmp_path: Path) -> None:
    file = str(tmp_path / "run.npz")
    comm = Communicator(transport="solo")
    ends_with(comm, replace(OPTIONS, max_steps=2, checkpoint=file))
    with pytest.raises(CheckpointError, match="was written with --logical-shards 4, this job has 5"):
        ends_with(comm, replace(OPTIONS, logical_shards=5, resume=file))


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("--engine torch", {"engine": "torch"}), ("--sharding contiguous", {"sharding": "contiguous"}),
        ("--uneven-inputs join", {"uneven_inputs": "join"}),
        ("--compression", {"compression": "fp16"}), ("--zero 2", {"zero": 2}),
    ],
)  # fmt: skip
def test_options_that_depend_on_the_number_of_ranks_are_refused(named: str, given: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=f"--logical-shards: expected no {named} with it"):
        replace(OPTIONS, **given)


def test_more_shards_than_samples_are_refused() -> None:
    comm = Communicator(transport="solo")
    with pytest.raises(ArgumentError, match="logical_shards: expected at most 103, the training samples, got 104"):
        Session(replace(OPTIONS, logical_shards=104), comm, SPLITS, make_console(comm))


def test_shards_take_turns_batch_by_batch() -> None:
    from clcomm.sync.sampler import DistributedSampler

    shards = [DistributedSampler(22, shard, 5, shuffle=False) for shard in (1, 2)]
    batches = ShardSampler(shards).batches(2)
    assert [batch.tolist() for batch in batches] == [[1, 6], [2, 7], [11, 16], [12, 17], [21], [0]]
