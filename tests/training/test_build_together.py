"""Ranks of a host build each program once, and one rank's failure is everyone's."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time

import numpy as np
import pytest

from clcomm.base.errors import DeviceError
from clcomm.base.host import usable_cores
from clcomm.comm.communicator import Communicator
from clcomm.engine import Device
from clcomm.engine import pocl as sealed_programs
from clcomm.sync.synchronizer import Synchronizer
from training.engines import build_together as module
from training.engines.build_together import build_together
from training.engines.parts import build_parts


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
    return Device.select(os.environ.get("CLCOMM_TEST_DEVICE", "cpu"))


def use_cache(monkeypatch, comm, tmp_path):
    """Pretend that PoCL's cache is rank 0's directory, and return it."""
    folder = comm.broadcast_object(tmp_path if comm.rank == 0 else None)
    monkeypatch.setattr(module, "shared_cache", lambda device: folder)
    return folder


@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_a_rehearsed_step_needs_no_kernel_more(model):
    """Forward, backward, synchronisation, optimizer and evaluation; what one sync launches as well."""
    comm = Communicator(transport="solo")
    parts = build_parts("native", model, (1, 12, 12), 5, seed=0, device="cpu")
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


@pytest.mark.mpi(min_size=2)
def test_a_rehearsed_step_needs_no_kernel_more_with_other_ranks(auto):
    """Sums over ranks too, where a rank's device makes them."""
    parts = build_parts("native", "mlp", (1, 12, 12), 5, seed=0, device="cpu")
    rehearsal = parts.rehearse((6,), "sgd", 0.1, {}, auto.size, auto.size)
    rehearsal.build(rehearsal.programs)
    rehearsal.close()
    built = set(parts.opencl._kernels)
    assert any(key[0] == "fold" for key in built) == parts.opencl.runs_in_caller
    optimizer, sync = parts.make_optimizer("sgd", 0.1), Synchronizer(auto)
    sync.broadcast_parameters(parts.model)
    for _ in range(3):
        parts.forward_backward(*parts.prepare(np.ones((6, 1, 12, 12), np.float32), np.zeros(6, np.int32)), 1.0)
        sync.sync_gradients(parts.model)
        optimizer.step()
        optimizer.zero_grad()
    assert set(parts.opencl._kernels) == built


@pytest.mark.mpi(min_size=1)
def test_each_program_is_built_once(monkeypatch, tmp_path, device):
    comm = Communicator()
    folder = use_cache(monkeypatch, comm, tmp_path)
    pretended = Pretended()
    build_together(comm, device, lambda: pretended, "run")
    built = sorted(number for part in comm.all_gather_object(pretended.built) for number in part)
    assert built == list(range(9))
    assert 1 <= sum(comm.all_gather_object(pretended.closed)) <= len(usable_cores())
    comm.barrier()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.mpi(min_size=2)
def test_ranks_without_a_core_wait_outside_of_collectives(monkeypatch, tmp_path, device, capfd):
    """As many ranks build as there are cores. A long build is no hang, of which ranks in a collective would tell."""
    monkeypatch.setenv("CLCOMM_STALL_WARNING_S", "0.3")

    class Slow(Pretended):
        def build(self, programs):
            super().build(programs)
            time.sleep(0.2)

    comm = Communicator()
    use_cache(monkeypatch, comm, tmp_path)
    monkeypatch.setattr(module, "usable_cores", lambda: frozenset({5}))
    slow = Slow()
    build_together(comm, device, lambda: slow, "run")
    assert sorted(map(len, comm.all_gather_object(slow.built))) == [0] * (comm.size - 1) + [9]
    assert "has waited" not in capfd.readouterr().err


@pytest.mark.mpi(min_size=1)
def test_a_builder_that_has_died_is_not_waited_for(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    mark = tmp_path / "core-0"
    for text, builds in ((str(dead.pid), False), (str(os.getpid()), True), ("done", False), ("", True)):
        mark.write_text(text)
        assert module._builds(mark) is builds
    assert not module._builds(tmp_path / "core-1")


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
def test_ranks_without_company_build_on_their_own(monkeypatch, tmp_path, device):
    comm = Communicator()
    monkeypatch.setattr(module, "shared_cache", lambda device: tmp_path / str(comm.rank))
    pretended = Pretended()
    build_together(comm, device, lambda: pretended, "run")
    assert pretended.built == list(range(9))
    without = Pretended()
    monkeypatch.setattr(module, "shared_cache", lambda device: None)
    build_together(comm, device, lambda: without, "run")
    assert without.built == [] and not without.closed


@pytest.mark.mpi(min_size=3)
def test_ranks_on_other_devices_stand_apart(monkeypatch, tmp_path, device):
    comm = Communicator()
    folder = use_cache(monkeypatch, comm, tmp_path)
    if comm.rank == 0:
        monkeypatch.setattr(module, "build_identity", lambda device: "another device")
    pretended = Pretended()
    build_together(comm, device, lambda: pretended, "run")
    parts = comm.all_gather_object(pretended.built)
    assert parts[0] == list(range(9)) and sorted(number for part in parts[1:] for number in part) == list(range(9))
    comm.barrier()
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "gone", "seal", "no seal", "stamp", "folder"])
def test_what_was_damaged_since_is_built_together_again(monkeypatch, tmp_path, device, caplog, damage):
    comm = Communicator(transport="solo")
    cache = use_cache(monkeypatch, comm, tmp_path)
    folder, seal = cache / "AB" / "ours", cache / "seal-0"
    (folder / "kernel").mkdir(parents=True)
    for file in ("program.bc", "kernel/kernel.so", "last_accessed"):
        (folder / file).write_bytes(b"built")
    stored = sealed_programs.SealedProgram(seal)
    stored.seal({stored.line.split("clcomm_")[1].split("(")[0]: "AB/ours"})
    monkeypatch.setattr(sealed_programs, "_used", {seal: stored})

    def builds():
        pretended = Pretended()
        build_together(comm, device, lambda: pretended, "run")
        return bool(pretended.built)

    assert builds() and not builds() and caplog.text == ""
    (stamp,) = cache.glob("run-*")
    (folder / "last_accessed").write_bytes(b"later")
    assert not builds()
    if damage == "cut":
        (folder / "kernel" / "kernel.so").write_bytes(b"bui")
    elif damage == "gone":
        (folder / "program.bc").unlink()
    elif damage == "seal":
        seal.write_bytes(seal.read_bytes()[:-1])
    elif damage == "no seal":
        seal.unlink()
    elif damage == "stamp":
        stamp.write_text('{"../../etc": {}}')
    else:
        shutil.rmtree(folder)
    assert builds() and "damaged; building anew" in caplog.text


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
    monkeypatch.setattr(module, "scratch_directory", lambda kind: contextlib.nullcontext(tmp_path / "gone"))
    pretended = Pretended()
    build_together(comm, device, lambda: pretended, "run")
    assert pretended.built == []
