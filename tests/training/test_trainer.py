"""The training loop on any number of ranks: the same result however ranks, batches and buckets are cut."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from clcomm.checkpoint import Checkpoint, load, save
from clcomm.checkpoint_series import CheckpointSeries
from clcomm.communicator import Communicator
from clcomm.distributed_optimizer import DistributedOptimizer
from clcomm.errors import ArgumentError, CheckpointError, ClcommError, MismatchError, NonFiniteError
from clcomm.sampler import DistributedSampler
from clcomm.synchronizer import Synchronizer
from tests.helpers import cpu_device, one_line
from training import engines
from training.datasets import ArrayDataset, load_synthetic
from training.loader import Loader
from training.metrics import StepRecord
from training.random_state import random_state
from training.schedules import parse_schedule
from training.snapshot import restore_snapshot, save_snapshot
from training.trainer import Callback, Trainer

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
    **sync_options: object,
) -> Trainer:
    dataset = data(samples)
    parts = engines.build("native", model, dataset.image_shape, dataset.classes, seed=3, device=cpu_device("cpu"))
    loader = Loader(dataset, DistributedSampler(samples, comm.rank, comm.size, seed=5, pad=pad), batch, prefetch=0)
    chosen = parts.make_optimizer(optimizer, 0.02 if optimizer == "sgd" else 1e-3, momentum=0.9)
    sync = Synchronizer(comm, **sync_options)  # type: ignore[arg-type]
    chosen = DistributedOptimizer(chosen, sync) if sharded else chosen
    trainer = Trainer(
        comm, sync, parts, chosen, loader, accumulation=accumulation, clip_norm=clip_norm, callbacks=[Watcher()]
    )
    trainer.schedule = parse_schedule("cosine:warmup=3", 100)
    return trainer


def train(trainer: Trainer, steps: int) -> State:
    for _ in trainer.train(epochs=10**6, max_steps=steps):
        pass
    return trainer.model.state_dict()


def assert_same_bits(first: State, second: State) -> None:
    assert list(first) == list(second)
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


def relative_difference(first: State, second: State) -> float:
    a, b = (np.concatenate([state[name].ravel() for name in first]).astype(np.float64) for state in (first, second))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def solo() -> Communicator:
    return Communicator(transport="solo")


@pytest.mark.mpi
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_ranks_with_small_batches_equal_one_with_a_large_batch(model: str) -> None:
    comm = Communicator()
    together = train(make_trainer(comm, samples=16 * comm.size * 12, batch=16, model=model), 50)
    alone = train(make_trainer(solo(), samples=16 * comm.size * 12, batch=16 * comm.size, model=model), 50)
    assert relative_difference(together, alone) < 1e-5
    comm.finalize()


@pytest.mark.mpi
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_bits_do_not_depend_on_buckets_or_transport(model: str) -> None:
    comm, through_mpi = Communicator(), Communicator(transport="mpi")
    reference = train(make_trainer(comm, model=model), 12)
    for size in (1, "4KiB", "37KiB", "1GiB"):
        assert_same_bits(train(make_trainer(comm, model=model, bucket_size=size), 12), reference)
    assert_same_bits(train(make_trainer(comm, model=model, use_bucketing=False), 12), reference)
    assert_same_bits(train(make_trainer(through_mpi, model=model), 12), reference)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_uneven_shards_equal_one_rank_with_all_samples(accumulation: int, sharded: bool) -> None:
    comm = Communicator()
    samples = 4 * comm.size * 6 + 1  # rank 0 has one more, which takes a step of its own
    options = {"samples": samples, "accumulation": accumulation, "pad": False}
    trainer = make_trainer(comm, sharded=sharded, **options)
    together, steps = epochs_of(trainer, 2)
    alone, steps_alone = epochs_of(make_trainer(solo(), **{**options, "batch": 4 * comm.size}), 2)
    assert steps == steps_alone == trainer.total_steps(2) == 2 * -(-7 // accumulation)
    assert relative_difference(together, alone) < 1e-5
    everyone = comm.all_gather_object({name: value.tobytes() for name, value in together.items()})
    assert all(each == everyone[0] for each in everyone)
    assert trainer.metrics.epoch_samples == len(trainer.loader.sampler)
    comm.finalize()


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


def epochs_of(trainer: Trainer, epochs: int) -> tuple[State, int]:
    """Train whole epochs, and return the parameters and the number of steps."""
    steps = sum(1 for _ in trainer.train(epochs))
    return trainer.model.state_dict(), steps


@pytest.mark.mpi
def test_clipping_holds_in_every_step_and_is_that_of_one_rank() -> None:
    comm = Communicator()
    samples = 4 * comm.size * 10
    clipped = train(make_trainer(comm, samples=samples, clip_norm=0.05), 10)
    alone = train(make_trainer(solo(), samples=samples, batch=4 * comm.size, clip_norm=0.05), 10)
    assert relative_difference(clipped, alone) < 1e-5
    assert relative_difference(train(make_trainer(comm, samples=samples), 10), alone) > 1e-3
    assert_same_bits(train(make_trainer(comm, samples=samples, clip_norm=0.05, sharded=True), 10), clipped)
    comm.finalize()


@pytest.mark.mpi
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_resumed_runs_have_the_bits_of_uninterrupted_ones(tmp_path: Path, optimizer: str) -> None:
    comm = Communicator()
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    samples = 60 * comm.size  # 15 steps an epoch at batch 4
    whole = train(make_trainer(comm, samples, optimizer=optimizer), 40)
    for stop in (7, 15, 22):  # within the first epoch, at its end, within the second
        first = make_trainer(comm, samples, optimizer=optimizer)
        train(first, stop)
        save_snapshot(CheckpointSeries(comm, path), first, {"seed": 5})
        resumed = make_trainer(comm, samples, optimizer=optimizer)
        restore_snapshot(path, resumed, {"seed": 5})
        assert resumed.progress.step == stop
        assert_same_bits(train(resumed, 40), whole)


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


def everything_of(trainer: Trainer) -> str:
    """Return all that a checkpoint would set."""
    arrays = trainer.model.state_dict() | trainer.optimizer.state_dict() | random_state()
    return str((trainer.state(), {name: array.tobytes() for name, array in arrays.items()}))


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


@pytest.mark.mpi
def test_random_state_of_every_rank_is_restored(tmp_path: Path) -> None:
    comm = Communicator()
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    trainer = make_trainer(comm, 120)
    seed_all(100 + comm.rank)
    draw_all(3)  # an odd number: both keep the second of a pair of normal numbers
    save_snapshot(CheckpointSeries(comm, path), trainer, {})
    expected = draw_all(5)
    for others in (0, 1):  # of which one draws an odd number
        seed_all(0)
        draw_all(others)
        restore_snapshot(path, trainer, {})
        assert draw_all(5) == expected
    comm.finalize()


@pytest.mark.mpi
def test_checkpoints_without_normal_numbers_are_still_read(tmp_path: Path) -> None:
    comm = Communicator()
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    trainer = make_trainer(comm, 120)
    seed_all(7 + comm.rank)
    save_snapshot(CheckpointSeries(comm, path), trainer, {})
    expected = draw_all(5)[:2]
    if comm.rank == 0:
        checkpoint = load(path)
        for name in [name for name in checkpoint.arrays if name.startswith("random/") and name.count("/") > 1]:
            del checkpoint.arrays[name]
        save(path, checkpoint)
    restore_snapshot(path, trainer, {})
    assert draw_all(5)[:2] == expected
    comm.finalize()


def test_pytorchs_random_state_is_restored(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    trainer = make_trainer(solo(), 120)
    torch.manual_seed(9)
    torch.randn(3)
    save_snapshot(CheckpointSeries(solo(), tmp_path / "c"), trainer, {})
    expected = torch.randn(5), torch.rand(40)
    torch.manual_seed(0)
    restore_snapshot(tmp_path / "c", trainer, {})
    assert torch.equal(torch.randn(5), expected[0]) and torch.equal(torch.rand(40), expected[1])
    checkpoint = load(tmp_path / "c")
    for state in (np.zeros(9, np.uint8), np.full(5056, 255, np.uint8), np.array("x")):
        checkpoint.arrays["random/0/torch"] = state
        save(tmp_path / "c", checkpoint)
        with pytest.raises(CheckpointError, match="random/0/torch: expected the state of PyTorch's generator"):
            restore_snapshot(tmp_path / "c", trainer, {})


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


def draw_all(count: int) -> tuple[list[float], ...]:
    """Return so many normal numbers of Python's and NumPy's generators, and evenly spread ones."""
    gauss = [random.gauss(0, 1) for _ in range(count)]
    return gauss, np.random.normal(size=count).tolist(), [random.random()], np.random.uniform(size=3).tolist()


@pytest.mark.mpi
@pytest.mark.parametrize("samples_a_rank", [48, 42])  # whole groups; a last group of one short micro-batch
def test_accumulated_micro_batches_equal_one_batch(samples_a_rank: int) -> None:
    comm = Communicator()
    samples = samples_a_rank * comm.size
    small = make_trainer(comm, samples, batch=4, accumulation=3)
    large = make_trainer(comm, samples, batch=12)
    assert small.steps_per_epoch == large.steps_per_epoch == 4
    first, second = train(small, 10), train(large, 10)
    assert relative_difference(first, second) < 1e-5
    assert small.sync.comm.stats.total("all_reduce", "gradients")["calls"] == 20  # ten steps each, one bucket
    sizes = [record.samples for record in small.callbacks[0].records[:4]]  # type: ignore[attr-defined]
    assert sizes == ([12, 12, 12, 12] if samples_a_rank == 48 else [12, 12, 12, 6])


@pytest.mark.mpi
def test_training_learns_and_tells_callbacks() -> None:
    comm = Communicator()
    trainer = make_trainer(comm, 480, batch=8, optimizer="adam")
    for _ in trainer.train(epochs=6):
        pass
    watcher = trainer.callbacks[0]
    assert isinstance(watcher, Watcher)
    assert [record.step for record in watcher.records] == list(range(1, 6 * trainer.steps_per_epoch + 1))
    assert len(watcher.losses) == 6 and watcher.losses[-1] < 0.5 * watcher.losses[0]
    assert np.ptp(comm.all_gather(np.array(watcher.losses)), axis=0).max() == 0  # the mean loss is the same everywhere
    assert trainer.metrics.samples == sum(record.samples for record in watcher.records)
    assert trainer.metrics.samples_per_s(comm.size) > 0
    assert all(record.data_wait_s <= record.seconds for record in watcher.records)


@pytest.mark.mpi
def test_a_gradient_that_is_not_finite_ends_the_step_on_every_rank() -> None:
    comm = Communicator()
    trainer = make_trainer(comm, 240, check_finite=True)
    culprit = comm.size - 1
    if comm.rank == culprit:
        trainer.loader.dataset = ArrayDataset(
            np.full((240, 1, 8, 8), np.inf, np.float32), np.zeros(240, np.int32), name="broken"
        )
    with pytest.raises(NonFiniteError, match=rf"has \d+ NaN and \d+ Inf on rank {culprit}"):
        train(trainer, 1)


@pytest.mark.mpi(min_size=2)
def test_models_of_other_shapes_are_refused_on_every_rank() -> None:
    comm = Communicator()
    shape = (1, 8, 8) if comm.rank == 0 else (1, 8, 9)
    dataset = load_synthetic(120, 16, shape=shape).train
    parts = engines.build("native", "mlp", dataset.image_shape, 10, seed=0, device="cpu")
    loader = Loader(dataset, DistributedSampler(120, comm.rank, comm.size), 4, prefetch=0)
    with pytest.raises(MismatchError, match=r"'fc1.weight \(128, 64\) float32' on rank 0, .*\(128, 72\)"):
        Trainer(comm, Synchronizer(comm), parts, parts.make_optimizer("sgd", 0.1), loader)


def test_same_seed_same_bits() -> None:
    assert_same_bits(train(make_trainer(solo()), 20), train(make_trainer(solo()), 20))


def test_accumulation_below_one_is_refused() -> None:
    with pytest.raises(ArgumentError, match="grad_accumulation: expected a number of micro-batches from 1 up, got 0"):
        make_trainer(solo(), accumulation=0)


@pytest.mark.mpi(min_size=1)
def test_the_loss_is_that_of_the_last_epoch_with_steps_whole_or_not() -> None:
    comm = Communicator()
    for steps, counted in ((3, 3), (6, 6), (8, 2)):  # of 6 an epoch
        trainer = make_trainer(comm, samples=24 * comm.size)
        train(trainer, steps)
        own = np.mean([record.loss for record in trainer.callbacks[0].records[-counted:]])  # type: ignore[attr-defined]
        assert trainer.train_loss == pytest.approx(np.mean(comm.all_gather_object(own))), steps
    comm.finalize()


def test_an_epoch_that_was_complete_at_a_resume_is_told_once() -> None:
    whole, resumed = make_trainer(solo(), samples=24), make_trainer(solo(), samples=24)
    for progress in whole.train(epochs=1):
        if progress.batch == 6:
            resumed.load_state(whole.state())
    train(resumed, 12)
    assert len(resumed.callbacks[0].losses) == 1 and np.isfinite(resumed.train_loss)  # type: ignore[attr-defined]
