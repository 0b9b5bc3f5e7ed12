"""Random states in checkpoints: every rank goes on with its own, PyTorch's too."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from clcomm.base.errors import CheckpointError
from clcomm.comm.communicator import Communicator
from clcomm.engine import RandomStream, Tensor, functional
from clcomm.jobs.checkpoint import load, save
from tests.helpers import cpu_device
from tests.training.trainers import make_trainer, solo
from training.checkpoint_series import CheckpointSeries
from training.random_state import check_random_state, continue_stream, random_state
from training.snapshot import restore_snapshot, save_snapshot


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
def test_the_devices_stream_of_every_rank_is_restored(tmp_path: Path) -> None:
    comm = Communicator()
    path = comm.broadcast_object(str(tmp_path / "run.npz"))
    trainer = make_trainer(comm, 120)
    device = trainer.parts.opencl
    assert device is not None
    stream, x = RandomStream.of(device), Tensor(np.ones(64, np.float32), device)
    stream.seed(9, comm.rank)
    functional.dropout(x)
    save_snapshot(CheckpointSeries(comm, path), trainer, {})
    expected = functional.dropout(x).numpy()
    stream.seed(8, comm.rank)
    restore_snapshot(path, trainer, {})
    assert functional.dropout(x).numpy().tobytes() == expected.tobytes()
    masks = comm.all_gather(expected)
    assert len({mask.tobytes() for mask in masks}) == comm.size
    comm.finalize()


def test_on_other_ranks_the_stream_goes_on_after_as_many_draws() -> None:
    device = cpu_device("cpu")
    stream = RandomStream.of(device)
    stream.load(np.array([1, 2, 0, 7, 0], np.uint32))
    state = random_state(device)
    stream.seed(0, 0)
    continue_stream(state, device, 4)
    assert stream.state().tolist() == [1, 2, 4, 7, 0]
    continue_stream(random_state(), device, 5)  # of an earlier release, or another engine
    assert stream.state().tolist() == [1, 2, 4, 7, 0]


def test_a_stream_that_makes_no_sense_is_refused() -> None:
    device = cpu_device("cpu")
    for wrong in (np.zeros(5, np.int32), np.zeros(4, np.uint32)):
        with pytest.raises(CheckpointError, match=r"random/0/stream: expected 5 uint32"):
            check_random_state("random/0", {**random_state(device), "stream": wrong})
