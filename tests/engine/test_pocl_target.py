"""PoCL's wheel compiles for the nearest processor that its LLVM knows, on any processor."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from itertools import combinations
from types import SimpleNamespace

import pyopencl as cl
import pytest

from clcomm.engine import pocl
from clcomm.engine.pocl import PROCESSORS, name_processor, nearest_processor
from tests.faults.launch import ROOT, clean_environment

DISTRO = "OpenCL 3.0 PoCL 3.0-rc2  Linux, Release, RELOC, LLVM 14.0.6, SLEEF, DISTRO, POCL_DEBUG"


class FakeDevice:
    """A device of PoCL's wheel, with memory where that keeps the processor's name."""

    parent_device = None

    def __init__(self, processor: bytes, **other):
        self._name = ctypes.create_string_buffer(processor)
        self._struct = (ctypes.c_void_p * 128)()
        self._struct[640 // 8] = ctypes.addressof(self._name)
        self.int_ptr = ctypes.addressof(self._struct)
        self.driver_version = other.get("driver_version", "3.0-rc2")
        self.version = f"OpenCL 3.0 PoCL HSTR: pthread-x86_64-unknown-linux-gnu-{processor.decode()}"
        self.platform = SimpleNamespace(version=other.get("platform_version", DISTRO))

    @property
    def processor(self) -> bytes:
        return ctypes.string_at(self._struct[640 // 8])


@pytest.fixture(autouse=True)
def the_wheel_on_x86(monkeypatch):
    monkeypatch.setattr(pocl, "find_spec", lambda name: name == "pocl_binary_distribution")
    monkeypatch.setattr(pocl.platform, "machine", lambda: "x86_64")


def test_a_part_of_a_device_names_the_whole_ones_processor():
    whole, part = FakeDevice(b"generic"), FakeDevice(b"generic")
    part.parent_device = whole
    assert name_processor(part)
    assert whole.processor == part.processor != b"generic"


def test_every_set_of_features_has_the_best_processor_that_fits():
    """For features drawn from all that matter, no code uses one that the processor lacks."""
    everything = sorted(set().union(*(needed for _, needed in PROCESSORS)))
    for count in (0, 1, 2, len(everything) - 2, len(everything) - 1, len(everything)):
        for features in map(frozenset, combinations(everything, count)):
            fitting = [name for name, needed in PROCESSORS if not needed - features]
            assert nearest_processor([*features, "unheard_of"]) == fitting[0]


def test_a_processor_without_a_name_gets_one(monkeypatch):
    monkeypatch.setattr(pocl, "processor_features", lambda: list(PROCESSORS[0][1]))
    device = FakeDevice(b"generic")
    assert name_processor(device)
    assert device.processor == b"znver3"


@pytest.mark.parametrize(
    ("processor", "other"),
    [
        (b"znver2", {}),
        (b"skylake", {}),
        (b"generic", {"driver_version": "3.1"}),
        (b"generic", {"driver_version": "6.0"}),
        (b"generic", {"platform_version": DISTRO.replace("14.0.6", "15.0.7")}),
    ],
)
def test_other_devices_are_left_alone(processor, other):
    device = FakeDevice(processor, **other)
    assert not name_processor(device)
    assert device.processor == processor


def test_other_architectures_are_left_alone(monkeypatch):
    monkeypatch.setattr(pocl.platform, "machine", lambda: "aarch64")
    assert not name_processor(FakeDevice(b"generic"))


def test_kernels_build_where_llvm_does_not_know_the_processor(tmp_path):
    """Remove the processor's name from this machine's PoCL, as on a newer processor, and compute."""
    if not any("DISTRO" in each.version and "LLVM 14.0.6" in each.version for each in cl.get_platforms()):
        pytest.skip("the OpenCL of this environment is not PoCL's wheel")
    script = (
        "import ctypes, pyopencl as cl\n"
        "found = next(p for p in cl.get_platforms() if 'LLVM 14.0.6' in p.version).get_devices()[0]\n"
        "named = not found.version.endswith('generic')\n"
        "if named:\n"  # elsewhere this machine's own processor is without a name
        "    ctypes.memmove(ctypes.c_void_p.from_address(found.int_ptr + 640).value, b'generic\\0', 8)\n"
        "from clcomm.engine import Device, Tensor, pocl\n"
        "pocl._is_unnamed = lambda device: True\n"
        "device = Device(found)\n"
        "assert (Tensor([1.0, 2.0], device) + 1).numpy().tolist() == [2, 3]\n"
    )
    environment = clean_environment(POCL_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
