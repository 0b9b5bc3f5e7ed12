"""A rehearsal lists the kernels of a run, and after building those the run builds no more."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from clcomm import optim
from clcomm.engine import CrossEntropyLoss, Device, Tensor
from models import MLP, ConvNet
from training.engines import rehearsal as rehearsal_module
from training.engines.rehearsal import Rehearsal, build_identity, shared_cache


@pytest.fixture
def fresh(device):
    """A device that has built nothing yet."""
    return Device(device.cl_device, kind=device.kind)


def step(kind, device):
    model = kind((1, 12, 12), 5, device=device, seed=3)
    model.flat_space()
    optimizer = optim.SGD(model, 0.1, momentum=0.9)
    rng = np.random.default_rng(0)
    images, labels = rng.random((6, 1, 12, 12), np.float32), np.arange(6, dtype=np.int32) % 5
    CrossEntropyLoss()(model(Tensor(images, device)), Tensor(labels, device)).backward()
    optimizer.step()
    return model


@pytest.mark.parametrize("kind", [MLP, ConvNet])
def test_what_was_rehearsed_and_built_is_all_a_step_needs(fresh, kind):
    rehearsal = Rehearsal(fresh)
    step(kind, rehearsal)
    assert not fresh._programs and not fresh._kernels, "a rehearsal builds nothing"
    assert len(rehearsal.programs) == len(set(rehearsal.programs)) > 3
    rehearsal.build(rehearsal.programs)
    built, kernels = set(fresh._programs), set(fresh._kernels)
    model = step(kind, fresh)
    assert set(fresh._programs) == built and set(fresh._kernels) == kernels
    plain = step(kind, Device(fresh.cl_device, kind=fresh.kind))
    for name, value in plain.state_dict().items():
        np.testing.assert_array_equal(model.state_dict()[name].view(np.uint8), value.view(np.uint8), name)


def test_parts_of_the_programs_can_be_built_by_themselves(fresh):
    rehearsal, again = Rehearsal(fresh), Rehearsal(fresh)
    for each in (rehearsal, again):
        step(MLP, each)
    assert rehearsal.programs == again.programs
    file, *_ = rehearsal.programs[0]
    rehearsal.build(rehearsal.programs[:1])
    assert [key[0] for key in fresh._programs] == [file]


def test_its_memory_is_given_back(fresh):
    rehearsal = Rehearsal(fresh)
    step(ConvNet, rehearsal)
    before = fresh.memory.peak_bytes
    rehearsal.close()
    assert 0 == fresh.memory.active_bytes == fresh.memory.peak_bytes < before


def test_the_identity_follows_device_and_kernels(device, monkeypatch):
    mine = build_identity(device)
    assert mine == build_identity(device)
    monkeypatch.setattr(rehearsal_module.program, "all_sources", lambda: "other kernels")
    assert build_identity(device) != mine


def test_the_identity_follows_tuning(device):
    tuned = Device(device.cl_device, kind=device.kind, tuning=replace(device.tuning, group=device.tuning.group // 2))
    assert build_identity(tuned) != build_identity(device)


def test_the_cache_is_where_pocl_has_it(monkeypatch, tmp_path):
    def on(platform, is_cpu=True):
        cl_device = SimpleNamespace(platform=SimpleNamespace(name=platform))
        return shared_cache(SimpleNamespace(is_cpu=is_cpu, cl_device=cl_device))

    monkeypatch.delenv("POCL_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("POCL_CACHE_DIR", str(tmp_path))
    assert on("Portable Computing Language") == tmp_path
    assert on("Portable Computing Language", is_cpu=False) is None and on("AMD") is None
    monkeypatch.setenv("POCL_KERNEL_CACHE", "0")
    assert on("Portable Computing Language") is None


DIVIDES = """
import faulthandler
import numpy as np
from clcomm.engine import Device, Tensor
from training.engines.rehearsal import Rehearsal

device = Device.select("cpu")
device.finish()
faulthandler.enable()  # PoCL, which ignores divisions of whole numbers by 0, no longer gets their signal
rehearsal = Rehearsal(device)
x = Tensor(np.ones((4, 1, 3), np.float32), rehearsal, requires_grad=True)
y = Tensor(np.ones((5, 3), np.float32), rehearsal)
(x + y)[:, 1:].sum().backward()
assert any(launch.wanted.name == "add_broadcast" for launch in rehearsal._launches.values())
rehearsal.build(rehearsal.programs)
"""


def test_no_kernel_divides_by_zero():
    ended = subprocess.run([sys.executable, "-c", DIVIDES], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-1000:]
