"""Ranks of a host build each program once, and one rank's failure is everyone's."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.communicator import Communicator
from clcomm.engine import Device
from clcomm.errors import DeviceError
from clcomm.synchronizer import Synchronizer
from training import build_together as module
from training import engines
from training.build_together import build_together


class Pretended:
    """A rehearsal of nine programs that notes what this rank builds."""

    def __init__(self, failing=()):
        self.programs, self.built, self.failing, self.closed = list(range(9)), [], failing, False

    def build(self, programs):
        if set(programs) & set(self.failing):
            raise DeviceError("kernels/gemm.cl did not build")
        self.built += programs

    def close(self):
        self.closed = True


@pytest.fixture
def device():
    return Device.select("cpu")


def use_cache(monkeypatch, comm, tmp_path):
    """Pretend that PoCL's cache is rank 0's directory, and return it."""
    folder = comm.broadcast_object(tmp_path if comm.rank == 0 else None)
    monkeypatch.setattr(module, "shared_cache", lambda device: folder)
    return folder


@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_a_rehearsed_step_needs_no_kernel_more(model):
    """Forward, backward, synchronisation, optimizer and evaluation; what one sync launches as well."""
    comm = Communicator(transport="solo")
    parts = engines.build("native", model, (1, 12, 12), 5, seed=0, device="cpu")
    settings = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    rehearsal = parts.rehearse((6, 10), "sgd", 0.1, settings)
    rehearsal.build(rehearsal.programs)
    rehearsal.close()
    built = set(parts.opencl._kernels)
    optimizer, sync = parts.make_optimizer("sgd", 0.1, **settings), Synchronizer(comm)
    sync.broadcast_parameters(parts.model)
    images, labels = np.ones((10, 1, 12, 12), np.float32), np.arange(10, dtype=np.int32) % 5
    for _ in range(3):
        parts.forward_backward(*parts.prepare(images[:6], labels[:6]), 1.0)
        sync.sync_gradients(parts.model)
        optimizer.step()
        optimizer.zero_grad()
    assert np.isfinite(parts.predict(images)).all()
    assert set(parts.opencl._kernels) == built


@pytest.mark.mpi(min_size=1)
def test_each_program_is_built_once(monkeypatch, tmp_path, device):
    comm = Communicator()
    folder = use_cache(monkeypatch, comm, tmp_path)
    pretended = Pretended()
    build_together(comm, device, lambda: pretended, "run")
    built = sorted(number for part in comm.all_gather_object(pretended.built) for number in part)
    assert built == (list(range(9)) if comm.size > 1 else []), "alone, a rank builds when it needs a kernel"
    assert pretended.closed == (comm.size > 1)
    comm.barrier()
    assert len(list(folder.iterdir())) == (comm.size > 1)


@pytest.mark.mpi(min_size=2)
def test_a_second_run_builds_nothing_and_another_one_does(monkeypatch, tmp_path, device):
    comm = Communicator()
    use_cache(monkeypatch, comm, tmp_path)
    build_together(comm, device, Pretended, "run")
    comm.barrier()
    again, other = Pretended(), Pretended()
    build_together(comm, device, lambda: again, "run")
    build_together(comm, device, lambda: other, "another run")
    assert again.built == [] and not again.closed
    assert sum(comm.all_gather_object(len(other.built))) == 9


@pytest.mark.mpi(min_size=2)
def test_ranks_without_company_and_other_drivers_build_on_their_own(monkeypatch, tmp_path, device):
    comm = Communicator()
    monkeypatch.setattr(module, "shared_cache", lambda device: tmp_path / str(comm.rank))
    pretended = Pretended()
    build_together(comm, device, lambda: pretended, "run")
    monkeypatch.setattr(module, "shared_cache", lambda device: tmp_path if comm.rank == 0 else None)
    build_together(comm, device, lambda: pretended, "run")
    assert pretended.built == []


@pytest.mark.mpi(min_size=3)
def test_ranks_on_other_devices_stand_apart(monkeypatch, tmp_path, device):
    comm = Communicator()
    folder = use_cache(monkeypatch, comm, tmp_path)
    if comm.rank == 0:
        monkeypatch.setattr(module, "build_identity", lambda device: "another device")
    pretended = Pretended()
    build_together(comm, device, lambda: pretended, "run")
    parts = comm.all_gather_object(pretended.built)
    assert parts[0] == [] and sorted(number for part in parts for number in part) == list(range(9))
    comm.barrier()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.mpi(min_size=2)
def test_a_failure_is_everyones_and_leaves_no_stamp(monkeypatch, tmp_path, device):
    comm = Communicator()
    folder = use_cache(monkeypatch, comm, tmp_path)
    with pytest.raises(DeviceError) as caught:
        build_together(comm, device, lambda: Pretended(failing=[4]), "run")
    assert set(comm.all_gather_object(str(caught.value))) == {"kernels/gemm.cl did not build"}
    assert list(folder.iterdir()) == []


@pytest.mark.mpi(min_size=2)
def test_claims_out_of_reach_are_no_error(monkeypatch, tmp_path, device):
    comm = Communicator()
    use_cache(monkeypatch, comm, tmp_path)
    monkeypatch.setattr(module.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "gone"))
    pretended = Pretended()
    build_together(comm, device, lambda: pretended, "run")
    assert pretended.built == []
