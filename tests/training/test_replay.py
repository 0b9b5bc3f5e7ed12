"""The Trainer with recorded steps and without: the same bits, and how much of a step is Python."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.communicator import Communicator
from clcomm.sampler import DistributedSampler
from clcomm.synchronizer import Synchronizer
from tests.helpers import cpu_device
from training.data.datasets import load_synthetic
from training.data.loader import Loader
from training.engines.parts import build_parts
from training.overhead import SAMPLE_EVERY
from training.schedules import parse_schedule
from training.trainer import Trainer

SAMPLES = 60  # a rank; batches of 8 leave 4 for the last


def train(comm: Communicator, replay: bool, model: str, optimizer: str, accumulation: int, steps: int) -> Trainer:
    dataset = load_synthetic(SAMPLES * comm.size, 16, shape=(1, 8, 8)).train
    parts = build_parts("native", model, dataset.image_shape, dataset.classes, seed=3, device=cpu_device("cpu"))
    parts.forward_backward.enabled = replay
    loader = Loader(dataset, DistributedSampler(len(dataset), comm.rank, comm.size, seed=5), 8, prefetch=0)
    chosen = parts.make_optimizer(optimizer, 0.01, momentum=0.9)
    trainer = Trainer(comm, Synchronizer(comm), parts, chosen, loader, accumulation=accumulation)
    trainer.schedule = parse_schedule("cosine:warmup=3", steps)
    for _ in trainer.train(epochs=10**6, max_steps=steps):
        pass
    return trainer


def check_same_bits(comm: Communicator, model: str, optimizer: str, accumulation: int) -> None:
    plain, replayed = (train(comm, replay, model, optimizer, accumulation, 20) for replay in (False, True))
    for name, value in plain.model.state_dict().items():
        assert value.tobytes() == replayed.model.state_dict()[name].tobytes(), name
    assert plain.train_loss == replayed.train_loss or np.isnan(plain.train_loss)
    assert plain.parts.forward_backward.replayed == 0
    assert replayed.parts.forward_backward.refusal is None
    assert replayed.parts.forward_backward.replayed >= 10


CASES = [("mlp", "sgd", 1), ("mlp", "adam", 3), ("convnet", "sgd", 3), ("convnet", "rmsprop", 1)]


@pytest.mark.parametrize("model, optimizer, accumulation", CASES)
def test_replayed_training_has_the_same_bits(model: str, optimizer: str, accumulation: int) -> None:
    check_same_bits(Communicator(transport="solo"), model, optimizer, accumulation)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("model, optimizer, accumulation", CASES[1:3])
def test_replayed_training_has_the_same_bits_on_several_ranks(model: str, optimizer: str, accumulation: int) -> None:
    comm = Communicator()
    check_same_bits(comm, model, optimizer, accumulation)
    comm.finalize()


def test_the_share_of_python_is_measured_now_and_then() -> None:
    trainer = train(Communicator(transport="solo"), True, "mlp", "sgd", 1, SAMPLE_EVERY - 1)
    assert trainer.overhead.launch_s is None and trainer.overhead.share(1e-3) is None
    for _ in trainer.train(epochs=10**6, max_steps=3 * SAMPLE_EVERY):
        pass
    step_s = trainer.metrics.step_s(0.5)
    assert trainer.overhead.launch_s > 0 and trainer.overhead.kernel_s > 0
    assert trainer.overhead.share(step_s) == pytest.approx(min(1.0, trainer.overhead.launch_s / step_s))


def test_engines_without_a_profile_have_no_share() -> None:
    pytest.importorskip("torch")
    parts = build_parts("torch", "mlp", (1, 8, 8), 10, seed=3, device="cpu")
    assert parts.profile is None
