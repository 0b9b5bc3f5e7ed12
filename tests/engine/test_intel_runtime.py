"""Intel's runtime beside others: found where it is asked for, limited to a share of cores, its programs built once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyopencl as cl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import DeviceError
from clcomm.engine import intel_runtime, program, selection

CPU = cl.device_type.CPU
installed = pytest.mark.skipif(intel_runtime.library() is None, reason="Intel's runtime: pip install -e '.[intel]'")


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment with the runtime's library, and an empty directory of the system's .icd files."""
    vendors, library = tmp_path / "vendors", tmp_path / "lib" / "libintelocl.so"
    for path in (vendors, library.parent):
        path.mkdir()
    library.touch()
    environment = {"OPENCL_VENDOR_PATH": str(vendors), "CLCOMM_CACHE_DIR": str(tmp_path / "cache")}
    environment["POCL_CACHE_DIR"] = str(tmp_path / "pocl")
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(intel_runtime, "library", lambda: library)
    return vendors


def named() -> dict[str, str]:
    """Return the content of the .icd files that the loader would read, by name."""
    directory = Path(os.environ["OCL_ICD_VENDORS"])
    assert directory.stat().st_mode & 0o077 == 0 or directory.parent.stat().st_mode & 0o077 == 0
    return {path.name: path.read_text().strip() for path in directory.iterdir()}


def test_the_runtime_is_added_to_what_the_system_has(system: Path) -> None:
    there = system.parent / "libgpu.so"
    there.touch()
    for name, library in (("gpu.icd", there), ("gone.icd", there.with_name("gone.so")), ("other.txt", there)):
        (system / name).write_text(f"{library}\n")
    (system / "plain.icd").write_text("libnvidia-opencl.so.1\n")
    expected = {"gpu.icd": str(there), "plain.icd": "libnvidia-opencl.so.1"}
    expected["intel-opencl-rt.icd"] = str(intel_runtime.library())
    intel_runtime.announce()
    assert named() == expected
    first = os.environ.pop("OCL_ICD_VENDORS")
    damaged = Path(first, "gpu.icd")
    damaged.write_text("elsewhere")
    intel_runtime.announce()
    assert os.environ.pop("OCL_ICD_VENDORS") == first and damaged.read_text() == f"{there}\n"
    (system / "plain.icd").unlink()
    intel_runtime.announce()
    assert os.environ["OCL_ICD_VENDORS"] != first, "other processes may read the first"


@pytest.mark.parametrize("why", ["not installed", "the user's directory", "the system's own", "no place to write"])
def test_nothing_changes(system: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "not installed":
        monkeypatch.setattr(intel_runtime, "library", lambda: None)
    elif why == "the user's directory":
        os.environ["OCL_ICD_VENDORS"] = "mine"
    elif why == "the system's own":
        own = system / "libintelocl.so"
        own.touch()
        (system / "intel64.icd").write_text(str(own))
    else:
        (system.parent / "cache").touch()
        monkeypatch.setattr(intel_runtime, "first_private", lambda *_: Path("/proc/none"))
    intel_runtime.announce()
    assert os.environ.get("OCL_ICD_VENDORS") == ("mine" if why == "the user's directory" else None)


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("has_pocl", [True, False])
@pytest.mark.parametrize(("spec", "means_it"), [
    (None, False), ("cpu", False), ("CPU:0", False), ("gpu", False), ("gpu:0", False), ("accelerator", False),
    ("cpu:1", True), ("gpu:1", True), ("intel", True), ("epyc", True),
])  # fmt: skip
def test_it_is_loaded_where_it_may_be_meant(system, monkeypatch, spec, means_it, has_pocl, variable) -> None:
    monkeypatch.setattr(selection, "find_spec", lambda name: object() if has_pocl else None)
    if variable and spec is not None:
        os.environ["CLCOMM_DEVICE"] = spec
    selection.prepare_environment(1, None if variable else spec)
    assert ("OCL_ICD_VENDORS" in os.environ) == (means_it or not has_pocl)
    selection.prepare_environment(1, spec, every=True)
    assert "OCL_ICD_VENDORS" in os.environ


class FakeDevice:
    """The attributes of an OpenCL device that selection reads."""

    def __init__(self, name: str, platform: str, units: int = 8):
        self.name, self.type, self.max_compute_units = name, CPU, units
        self.platform = SimpleNamespace(name=platform)


def test_the_first_cpu_is_anothers_and_ranks_share_one_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    intel, pocl = FakeDevice("EPYC", intel_runtime.PLATFORM), FakeDevice("basic-EPYC", "Portable Computing Language")
    platforms = [SimpleNamespace(get_devices=lambda each=each: [each]) for each in (intel, pocl)]
    monkeypatch.delenv("CLCOMM_DEVICE", raising=False)
    monkeypatch.setattr(cl, "get_platforms", lambda: platforms)
    for rank in range(3):
        assert selection.choose(None, rank).cl_device is pocl and selection.choose("cpu", rank).cl_device is pocl
        assert selection.choose("cpu:1", rank).cl_device is selection.choose("intel", rank).cl_device is intel
    monkeypatch.setattr(cl, "get_platforms", lambda: platforms[1:])
    monkeypatch.setattr(intel_runtime, "library", lambda: Path("libintelocl.so"))
    with pytest.raises(DeviceError, match="Intel's runtime is installed, and loaded if CLCOMM_DEVICE names it before"):
        selection.choose("intel", 0)


@pytest.mark.parametrize(("cores", "given", "units"), [(0, "", 1), (1, "", 1), (3, "", 3), (9, "", 8), (3, "2", 2)])
def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch, cores: int, given: str, units: int) -> None:
    name = "CL_CONFIG_CPU_TBB_NUM_WORKERS"
    monkeypatch.setattr(os, "environ", {name: given} if given else {})
    intel_runtime.limit(cores)
    assert selection.compute_units(FakeDevice("EPYC", intel_runtime.PLATFORM)) == units
    assert selection.compute_units(FakeDevice("EPYC", "Portable Computing Language")) == 8


# -- the cache of programs


def cached(**changed: str) -> program.CachedProgram:
    """Return the place of a program of a pretended device, of which some words are changed."""
    words = {"platform": "1.0", "name": "EPYC", "version": "3.1", "driver": "7", "source": "void", "option": "-DA=1"}
    words |= changed
    platform = SimpleNamespace(name=intel_runtime.PLATFORM, version=words["platform"])
    device: Any = SimpleNamespace(
        platform=platform, name=words["name"], version=words["version"], driver_version=words["driver"]
    )
    return program.CachedProgram(device, words["source"], [words["option"]])


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CLCOMM_CACHE_DIR", str(tmp_path))
    return tmp_path / "programs"


def test_a_program_is_found_by_all_that_its_code_depends_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached().write(b"code")
    assert cached().read() == b"code"
    for word in ("platform", "name", "version", "driver", "source", "option"):
        assert cached(**{word: "other"}).read() is None
    monkeypatch.setenv("CL_CONFIG_CPU_TARGET_ARCH", "corei7")
    assert cached().read() is None
    cached().write(b"older code")
    monkeypatch.delenv("CL_CONFIG_CPU_TARGET_ARCH")
    assert cached().read() == b"code" and len(list(cache.glob("*/*/program"))) == 2
    monkeypatch.setattr(program, "processor_features", lambda: ["sse2"])
    assert cached().read() is None


@given(at=st.integers(0, 99), change=st.sampled_from(["flip", "cut", "longer"]))
def test_what_is_damaged_is_not_read(tmp_path_factory: pytest.TempPathFactory, at: int, change: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLCOMM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        place = cached()
        place.write(bytes(68))
        path = next(Path(os.environ["CLCOMM_CACHE_DIR"]).glob("programs/*/*/program"))
        content = bytearray(path.read_bytes())
        assert len(content) == 100 and place.read() == bytes(68)
        if change == "flip":
            content[at] ^= 1
        path.write_bytes(content[:at] if change == "cut" else content + b"\0" if change == "longer" else content)
        assert place.read() is None
        place.write(bytes(68))
        assert place.read() == bytes(68)


def test_where_nothing_can_be_kept_each_process_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "directory", lambda: None)
    place = cached()
    place.write(b"code")
    assert place.read() is None


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs").chmod(0o777)
    monkeypatch.setenv("CLCOMM_CACHE_DIR", str(tmp_path))
    assert program.directory() != tmp_path / "programs"


# -- the runtime itself

_JOB = """
import sys
import numpy as np
import pyopencl as cl
from clcomm.engine import Device, Tensor, program, selection
from clcomm.engine import functional as F

sources = []  # of each program, whether it was made from source
init = cl.Program.__init__
def created(self, *args, **settings):
    sources.append(len(args) == 2)
    init(self, *args, **settings)
cl.Program.__init__ = created

device = Device.select("intel", cores=int(sys.argv[1]))
values = np.random.default_rng(0).standard_normal((40, 50), np.float32)
x = Tensor(values, device, requires_grad=True)
y = F.softmax(x @ Tensor(values.T.copy(), device))
y.backward(Tensor(np.ones((40, 40), np.float32), device))
kernels = [program.argument_types(kernel) for kernel in device._kernels.values()]
assert any(kind is np.int32 for types in kernels for kind in types)
labels = [candidate.label for candidate in selection.candidates()]
print(device.runs_in_caller, device.compute_units, sum(sources), len(sources), labels)
print(y.numpy().tobytes().hex(), x.grad.numpy().tobytes().hex())
"""


def job(cache: Path, cores: int) -> tuple[list[str], str]:
    """Return the words that a job on the runtime prints of itself, and its results' bits."""
    left_out = ("OCL_", "CL_CONFIG", "CLCOMM_", "POCL_", "PYOPENCL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment |= {"CLCOMM_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(cache / "own"), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-W", "error", "-c", _JOB, str(cores)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    what, bits = done.stdout.splitlines()
    return what.split(maxsplit=4), bits


@installed
def test_programs_are_built_once_and_give_the_same_bits_from_the_cache(tmp_path: Path) -> None:
    (_, units, sources, programs, labels), bits = job(tmp_path, 1)
    assert units == "1" and "cpu:0" in labels
    assert int(sources) == int(programs) >= 2
    stored = sorted(tmp_path.glob("programs/*/*/program"))
    assert [path.stat().st_size > 1000 for path in stored] == [True] * int(programs), shutil.disk_usage(tmp_path)
    (_, _, sources, again, _), later = job(tmp_path, 1)
    assert sorted(tmp_path.glob("programs/*/*/program")) == stored  # under the same keys
    assert (sources, again) == ("0", programs) and later == bits
    assert not (tmp_path / "own" / "pyopencl").exists()  # though the job imports PyOpenCL before clcomm
    damaged = sorted(tmp_path.glob("programs/*/*/program"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (_, _, sources, _, _), later = job(tmp_path, 1)
    assert sources == "1" and later == bits


@installed
@pytest.mark.parametrize("cores", [0, 1, 2])
def test_a_share_of_one_core_computes_in_the_calling_thread(tmp_path: Path, cores: int) -> None:
    (in_caller, units, *_), _ = job(tmp_path, cores)
    available = len(os.sched_getaffinity(0))
    assert int(units) == min(max(cores, 1), available)
    assert (in_caller == "True") == (units == "1")
