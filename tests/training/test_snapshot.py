"""Checkpoints of a training: resumed runs have the bits of whole ones, and nonsense changes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clcomm.base.errors import CheckpointError, ClcommError
from clcomm.comm.communicator import Communicator
from clcomm.engine import BatchNorm1d, Dropout, Generator, Linear, Module, RandomStream
from clcomm.engine import functional as F
from clcomm.jobs.checkpoint import Checkpoint, load, save
from tests.compressed_gradients import FEEDBACK
from tests.helpers import one_line
from tests.training.trainers import assert_same_bits, epochs_of, everything_of, make_trainer, solo, train
from training.checkpoint_series import CheckpointSeries
from training.engines import parts as parts_module
from training.snapshot import restore_snapshot, save_snapshot
from training.trainer_state import load_state, state_of


def stage(number: int) -> dict[str, object]:
    """Return the options of ZeRO's stage; 0: a plain update."""
    return {"optimizer": "adam", "sharded": number > 0, "zero": number or 1}


#: What a run has when it is saved and, where that differs, when it goes on; ZeRO's stages have the plain run's bits.
RESUMED = [
    *(({"optimizer": kind}, None) for kind in ("sgd", "adam")),
    *(({"compression": scheme}, None) for scheme in FEEDBACK),
    *((stage(before), stage(after)) for before, after in (
        (1, 1), (1, 0), (0, 1), (2, 3), (3, 2), (3, 0), (0, 3), (1, 2),
    )),
]  # fmt: skip


@pytest.mark.mpi
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_resumed_runs_have_the_bits_of_uninterrupted_ones(tmp_path: Path, before: dict, after: dict | None) -> None:
    comm = Communicator()
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    samples = 60 * comm.size  # 15 steps an epoch at batch 4
    whole = train(make_trainer(comm, samples, **(before if after is None else stage(0))), 25)
    for stop in (7, 15, 22):  # within the first epoch, at its end, within the second
        first = make_trainer(comm, samples, **before)
        train(first, stop)
        save_snapshot(CheckpointSeries(comm, path), first, {"seed": 5})
        resumed = make_trainer(comm, samples, **(after or before))
        restore_snapshot(path, resumed, {"seed": 5})
        assert resumed.progress.step == stop
        assert_same_bits(train(resumed, 25), whole)


class NormNet(Module):
    """A network with buffers, and with random numbers of its own on the device."""

    def __init__(self, in_shape, classes, *, device, seed):
        rng = Generator(seed)
        self.fc1 = Linear(int(np.prod(in_shape)), 12, device=device, rng=rng)
        self.norm, self.drop = BatchNorm1d(12, momentum=None, device=device), Dropout(0.25)
        self.fc2 = Linear(12, classes, device=device, rng=rng)

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.norm(self.fc1(F.flatten(x, 1))))))


@pytest.mark.mpi
def test_buffers_and_masks_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts_module._KINDS, "mlp", NormNet)
    comm = Communicator()
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    samples = 60 * comm.size
    for stop in (7, 15):
        runs = []
        for resumes in (False, True):
            trainer = make_trainer(comm, samples)
            RandomStream.of(trainer.parts.opencl).seed(3, comm.rank)
            train(trainer, stop)
            if resumes:
                save_snapshot(CheckpointSeries(comm, path), trainer, {})
                trainer = make_trainer(comm, samples)
                restore_snapshot(path, trainer, {})
            train(trainer, 40)
            trainer.sync.broadcast_buffers(trainer.model)
            runs.append(trainer.model.state_dict())
            assert trainer.parts.forward_backward.replayed > 5
        assert_same_bits(*runs)
        assert runs[0]["norm.num_batches_tracked"] == 40
    comm.finalize()


def test_predictions_leave_buffers_and_the_mode_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts_module._KINDS, "mlp", NormNet)
    trainer = make_trainer(solo(), 48)
    train(trainer, 5)
    before = everything_of(trainer)
    images = np.random.default_rng(0).standard_normal((9, 1, 8, 8)).astype(np.float32)
    logits = [trainer.parts.predict(images[start:]) for start in (0, 4)]
    np.testing.assert_allclose(logits[0][4:], logits[1], rtol=1e-5, atol=1e-6)  # of samples, not of batches
    assert everything_of(trainer) == before and trainer.model.training and trainer.model.norm.training


@pytest.mark.mpi(min_size=2)
def test_uneven_shards_go_on_where_they_stopped(tmp_path: Path) -> None:
    comm = Communicator()
    folder = comm.broadcast_object(str(tmp_path))
    options = {"samples": 4 * comm.size * 6 + 1, "pad": False}
    whole, _ = epochs_of(make_trainer(comm, **options), 2)
    first = make_trainer(comm, **options)
    train(first, 6)  # rank 0 alone has a batch left
    save_snapshot(CheckpointSeries(comm, f"{folder}/c"), first, {})
    second = make_trainer(comm, **options)
    restore_snapshot(f"{folder}/c", second, {})
    assert_same_bits(epochs_of(second, 2)[0], whole)
    comm.finalize()


def test_an_epoch_that_was_complete_at_a_resume_is_told_once() -> None:
    whole, resumed = make_trainer(solo(), samples=24), make_trainer(solo(), samples=24)
    for progress in whole.train(epochs=1):
        if progress.batch == 6:
            load_state(resumed, state_of(whole))
    train(resumed, 12)
    assert len(resumed.callbacks[0].losses) == 1 and np.isfinite(resumed.train_loss)  # type: ignore[attr-defined]


@pytest.mark.mpi
def test_checkpoints_of_other_jobs_are_refused_on_every_rank(tmp_path: Path) -> None:
    comm = Communicator()
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    trainer = make_trainer(comm, 120)
    train(trainer, 2)
    save_snapshot(CheckpointSeries(comm, path), trainer, {"batch_size": 4})
    with pytest.raises(CheckpointError, match=r"parameter 'conv1.weight' is \(16, 1, 3, 3\) float32 here"):
        restore_snapshot(path, make_trainer(comm, 120, model="convnet"), {"batch_size": 4})
    with pytest.raises(CheckpointError, match="written with --batch-size 4, this job has 8"):
        restore_snapshot(path, make_trainer(comm, 120), {"batch_size": 8})
    with pytest.raises(CheckpointError, match="length: the checkpoint was written with 120, this job has 240"):
        restore_snapshot(path, make_trainer(comm, 240), {"batch_size": 4})


NONSENSE = [
    ("progress", "step", "x", "progress.step: expected a whole number from 0 to"),
    ("progress", "step", [1], r"progress.step: .* got \[1\]"),
    ("progress", "step", 10**30, "progress.step"),
    ("progress", "epoch", math.nan, "progress.epoch: .* got nan"),
    ("progress", "batch", -3, "progress.batch: .* got -3"),
    ("progress", "batch", 31, "progress.batch: expected a whole number from 0 to 30, got 31"),
    ("progress", "batch", None, "progress.batch: .* got nothing"),
    ("sampler", "seed", -1, "sampler.seed"),
    ("sampler", "seed", 10**30, "sampler.seed"),
    ("sampler", "shuffle", 2, "sampler.shuffle"),
    ("sampler", "epoch", "x", "sampler.epoch"),
    ("sampler", "done", 10**6, "sampler.done"),
    ("sampler", "world_size", -3, "sampler.world_size"),
    ("sampler", "world_size", 0, "sampler.world_size"),
    ("sampler", "world_size", 10**30, "sampler.world_size"),
    (None, "base_lr", math.nan, "base_lr: expected a finite number from 0 up, got nan"),
    (None, "base_lr", "x", "base_lr"),
    (None, "progress", [1], "progress: expected its entries by name"),
    (None, "sampler", None, "sampler: expected its entries by name, got nothing"),
]

WORDS = np.zeros(1250, np.uint32)

NONSENSE_ARRAYS = [
    ("random/0", np.full(1250, np.nan)),
    ("random/0", np.full(1250, "x")),
    ("random/0", np.full(1250, -1)),
    ("random/0", np.full(1250, 2**40)),
    ("random/0", np.full(1250, 2**31, np.uint32)),  # positions outside the words
    ("random/0", WORDS[1:]),
    ("random/0/normal", np.array([np.inf, 0.0])),
    ("random/0/normal", np.array(["x", "y"])),
    ("optimizer/steps", np.array(np.nan)),
    ("optimizer/steps", np.array(-3)),
    ("optimizer/steps", np.array("x")),
    ("optimizer/steps", np.array([1, 2])),
    ("optimizer/lr", np.array([0.1, 0.2])),
    ("optimizer/momentum", np.array(np.nan)),
    ("optimizer/kind", np.array(["SGD", "SGD"])),
]


@pytest.fixture(name="spoilt")
def make_spoilt(tmp_path: Path):
    """Return a function that saves a checkpoint, spoils it, and shows what the error says and that nothing changed."""
    comm = Communicator()
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    trainer = make_trainer(comm, 120 * comm.size)
    train(trainer, 2)
    save_snapshot(CheckpointSeries(comm, path), trainer, {})

    def said_of(spoil: Callable[[Checkpoint], object]) -> str:
        if comm.rank == 0:
            checkpoint = load(path)
            spoil(checkpoint)
            save(path, checkpoint)
        other = make_trainer(comm, 120 * comm.size)
        before = everything_of(other)
        with pytest.raises(ClcommError) as caught:
            restore_snapshot(path, other, {})
        assert everything_of(other) == before
        texts = comm.all_gather_object(one_line(caught))
        assert set(texts) == {texts[0]}
        return texts[0]

    yield said_of
    comm.finalize()


@pytest.mark.mpi
@pytest.mark.parametrize(("group", "name", "value", "said"), NONSENSE)
def test_facts_that_make_no_sense_are_refused_before_anything_changes(
    spoilt: Callable[..., str], group: str | None, name: str, value: object, said: str
) -> None:
    def spoil(checkpoint: Checkpoint) -> None:
        training = checkpoint.facts["training"]
        (training if group is None else training[group])[name] = value

    assert re.match(f"checkpoint: {said}", spoilt(spoil))


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "array"), NONSENSE_ARRAYS)
def test_arrays_that_make_no_sense_are_refused_before_anything_changes(
    spoilt: Callable[..., str], name: str, array: np.ndarray
) -> None:
    assert name.split("/")[1] in spoilt(lambda checkpoint: checkpoint.arrays.update({name: array}))


@pytest.mark.mpi
def test_ranks_that_did_not_write_are_refused(spoilt: Callable[..., str]) -> None:
    def spoil(checkpoint: Checkpoint) -> None:
        checkpoint.facts["training"]["sampler"]["world_size"] = 999
        checkpoint.facts["training"]["progress"]["batch"] = 0

    assert re.match(r"checkpoint: sampler.world_size: expected a whole number from (\d) to \1, got 999", spoilt(spoil))
    assert "training: expected its entries by name" in spoilt(lambda checkpoint: checkpoint.facts.pop("training"))
    assert "world_size: expected" in spoilt(lambda checkpoint: checkpoint.facts.update({"world_size": 999}))
