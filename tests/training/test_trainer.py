"""The training loop on any number of ranks: the same result however ranks, batches and buckets are cut."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, MismatchError, NonFiniteError
from clcomm.comm.communicator import Communicator
from clcomm.sync.sampler import DistributedSampler
from clcomm.sync.synchronizer import Synchronizer
from tests.training.trainers import Watcher, assert_same_bits, epochs_of, make_trainer, relative_difference, solo, train
from training.data.datasets import ArrayDataset, load_synthetic
from training.data.loader import Loader
from training.engines.parts import build_parts
from training.trainer import Trainer


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
    assert trainer.metrics.samples_per_s() > 0
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
    parts = build_parts("native", "mlp", dataset.image_shape, 10, seed=0, device="cpu")
    loader = Loader(dataset, DistributedSampler(120, comm.rank, comm.size), 4, prefetch=0)
    with pytest.raises(MismatchError, match=r"'fc1.weight \(128, 64\) float32' on rank 0, .*\(128, 72\)"):
        Trainer(comm, Synchronizer(comm), parts, parts.make_optimizer("sgd", 0.1), loader)


def test_same_seed_same_bits() -> None:
    assert_same_bits(train(make_trainer(solo()), 20), train(make_trainer(solo()), 20))


def test_accumulation_below_one_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"grad_accumulation: expected a number of micro-batches from 1 to \d+"):
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
