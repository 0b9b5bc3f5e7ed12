"""Selection of a device, errors when none fits, kernels and memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyopencl as cl
import pytest

from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.base.host import launcher
from clcomm.engine import Device, Tensor, default_device, program, selection, set_default_device
from clcomm.engine import device as device_module


class FakeDevice:
    """The attributes of an OpenCL device that selection reads."""

    def __init__(self, name: str, kind: int, platform: str):
        self.name, self.type = name, kind
        self.platform = SimpleNamespace(name=platform)


@pytest.fixture
def three_devices(monkeypatch):
    """Pretend to have a platform with a CPU and one with two GPUs; CLCOMM_DEVICE is unset."""
    kinds = cl.device_type
    platforms = [
        SimpleNamespace(get_devices=lambda: [FakeDevice("EPYC", kinds.CPU, "Portable")]),
        SimpleNamespace(get_devices=lambda: [FakeDevice(f"Radeon {n}", kinds.GPU, "AMD") for n in (6, 7)]),
    ]
    monkeypatch.setattr(cl, "get_platforms", lambda: platforms)
    monkeypatch.delenv("CLCOMM_DEVICE", raising=False)


@pytest.mark.parametrize(("spec", "local_rank", "label"), [
    (None, 0, "gpu:0"), (None, 1, "gpu:1"), (None, 2, "gpu:0"),
    ("gpu", 1, "gpu:1"), ("gpu:0", 1, "gpu:0"), ("GPU:1", 0, "gpu:1"),
    ("cpu", 3, "cpu:0"), ("cpu:0", 0, "cpu:0"),
    ("radeon 7", 0, "gpu:1"), ("amd", 0, "gpu:0"), ("portable", 5, "cpu:0"),
])  # fmt: skip
def test_choice(three_devices, spec, local_rank, label):
    assert selection.choose(spec, local_rank).label == label


def test_choice_by_environment(three_devices, monkeypatch):
    monkeypatch.setenv("CLCOMM_DEVICE", "epyc")
    assert selection.choose(None, 0).label == "cpu:0"
    assert selection.choose("gpu", 0).label == "gpu:0"
    monkeypatch.setenv("CLCOMM_DEVICE", "gpu:9")
    with pytest.raises(DeviceError, match=r"^CLCOMM_DEVICE='gpu:9': expected one of cpu:0 \(EPYC, Portable\), gpu:0"):
        selection.choose(None, 0)


def test_a_simulator_is_taken_by_name_alone(monkeypatch):
    simulator = SimpleNamespace(get_devices=lambda: [FakeDevice("Oclgrind Simulator", cl.device_type.GPU, "Oclgrind")])
    real = SimpleNamespace(get_devices=lambda: [FakeDevice("EPYC", cl.device_type.CPU, "Portable")])
    monkeypatch.delenv("CLCOMM_DEVICE", raising=False)
    monkeypatch.setattr(cl, "get_platforms", lambda: [simulator, real])
    assert selection.choose(None, 0).label == "cpu:0"
    assert selection.choose("oclgrind", 0).label == selection.choose("gpu", 0).label == "gpu:0"
    monkeypatch.setattr(cl, "get_platforms", lambda: [simulator])
    assert selection.choose(None, 0).label == "gpu:0"


@pytest.mark.parametrize("spec", ["gpu:7", "nothing like it", "", "accelerator"])
def test_unknown_device_lists_what_is_there(three_devices, spec):
    with pytest.raises(DeviceError) as caught:
        selection.choose(spec, 0)
    present = "cpu:0 (EPYC, Portable), gpu:0 (Radeon 6, AMD)"
    assert str(caught.value).startswith(f"device={spec!r}: expected one of {present}")
    assert "\n" not in str(caught.value)


def test_without_a_platform(monkeypatch):
    def none_found():
        raise cl.LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")

    for replacement in (none_found, list):
        monkeypatch.setattr(cl, "get_platforms", replacement)
        with pytest.raises(DeviceError, match=r"no OpenCL platform found: run `pip install -e '.*\[pocl\]'`"):
            Device.select()


def test_spec_of_a_wrong_type():
    with pytest.raises(ArgumentError, match="device: expected a Device or a name such as 'gpu:0', got 3"):
        Device.select(3)


@pytest.mark.parametrize(("variables", "place"), [
    ({}, (0, 1)),
    ({"MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}, (2, 4)),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 2)),
    ({"MPI_LOCALRANKID": "3"}, (3, 4)),
])  # fmt: skip
def test_local_place_from_the_launcher(monkeypatch, variables, place):
    for name in (*launcher._LOCAL_RANKS, *launcher._LOCAL_SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert selection.local_place() == place
    assert selection.local_place(5, 8) == (5, 8)


@pytest.mark.parametrize("from_pypi", [True, False])
@pytest.mark.parametrize(("cores", "threads"), [(0, "1"), (1, "1"), (6, "6")])
def test_cores_are_shared_before_pocl_loads(monkeypatch, tmp_path, cores, threads, from_pypi):
    cache = {"POCL_CACHE_DIR": str(tmp_path)}
    monkeypatch.setattr(os, "environ", dict(cache))
    monkeypatch.setattr(selection, "find_spec", lambda name: object() if from_pypi else None)
    selection.prepare_environment(cores)
    expected = cache | {"POCL_MAX_PTHREAD_COUNT": threads, "POCL_CPU_MAX_CU_COUNT": threads}
    if cores <= 1 and from_pypi:
        expected["POCL_DEVICES"] = "basic"
    assert {name: value for name, value in os.environ.items() if name.startswith("POCL")} == expected


def test_what_the_user_has_set_stays(monkeypatch, tmp_path):
    given = {"POCL_DEVICES": "pthread", "POCL_MAX_PTHREAD_COUNT": "3", "POCL_CACHE_DIR": str(tmp_path)}
    monkeypatch.setattr(os, "environ", given)
    selection.prepare_environment(1)
    selection.prepare_environment(8)
    assert os.environ["POCL_DEVICES"] == "pthread" and os.environ["POCL_MAX_PTHREAD_COUNT"] == "3"


def test_cores_divided_by_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    assert [selection.core_share(n) for n in (1, 4, 5, 24)] == [12, 3, 2, 0]


@pytest.mark.parametrize("cores", ["1", "2"])
def test_a_fresh_process_selects_and_computes(cores):
    code = (
        "from clcomm.engine import Device, Tensor\n"
        f"device = Device.select('cpu', cores={cores})\n"
        "assert (Tensor([1.0, 2.0], device) + 1).numpy().tolist() == [2, 3]\n"
        "print(device.compute_units, device.name.split('-')[0])\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("POCL_", "CLCOMM_"))}
    environment["PYTHONPATH"] = os.getcwd()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    if "basic" in done.stdout or "pthread" in done.stdout:  # PoCL's drivers, under the names they have on PyPI
        assert done.stdout.split()[1] == ("basic" if cores == "1" else "pthread")


@pytest.mark.parametrize("name", ["PYOPENCL_BUILD_OPTIONS", "POCL_EXTRA_BUILD_FLAGS", None])
def test_options_of_the_environment_for_kernels_are_named_once(monkeypatch, caplog, name):
    for each in selection._BUILD_OPTIONS:
        monkeypatch.setenv(each, " -cl-fast-relaxed-math" if each == name else " ")
    selection._warn_of_options.cache_clear()
    for _ in range(2):
        selection.prepare_environment(1)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (name is not None) and all(name in each and "fast-relaxed" in each for each in said)


def test_default_device_can_be_set(device):
    before = device_module.process_devices().default
    try:
        set_default_device(device)
        assert default_device() is device and Tensor([1.0]).device is device
        set_default_device(None)
        assert default_device() is not device
    finally:
        device_module.process_devices().default = before


def test_kernels_are_built_once(device):
    kernel = device.kernel("elementwise", "add")
    assert device.kernel("elementwise", "add") is kernel
    assert device.kernel("elementwise", "add", UNUSED=1) is not kernel
    assert device.kernel("elementwise", "add", UNUSED=1) is device.kernel("elementwise", "add", UNUSED=1)


def test_a_build_failure_shows_options_log_and_source(device, monkeypatch):
    source = "__kernel void k(__global float *x) { x[0] = LENGTH + oops; }"
    monkeypatch.setattr(program, "source_of", lambda file: source)
    with pytest.raises(DeviceError) as caught:
        device.kernel("broken", "k", LENGTH=3)
    message = str(caught.value)
    assert "kernels/broken.cl did not build" in message and "-DLENGTH=3" in message and "oops" in message
    assert "\n" not in message
    saved = message.rsplit("source and log: ", 1)[1].rstrip(")")
    with open(saved, encoding="utf-8") as file:
        assert "LENGTH + oops" in file.read()
    os.unlink(saved)


def test_kernels_without_argument_information(device, monkeypatch):
    def unavailable(*_):
        raise cl.RuntimeError("clGetKernelArgInfo failed: KERNEL_ARG_INFO_NOT_AVAILABLE")

    monkeypatch.setattr(program, "argument_types", unavailable)
    fresh = Device(device.cl_device, kind=device.kind)
    assert isinstance(fresh.kernel("elementwise", "affine"), program._UntypedKernel)
    assert (Tensor([1.0, 2.0], fresh) * 3 + 0.5).numpy().tolist() == [3.5, 6.5]


def test_a_failing_launch_is_a_device_error(device):
    kernel = device.kernel("elementwise", "fill")
    with pytest.raises(DeviceError, match=r"kernel fill on .*"):
        device.launch(kernel, (7,), (3, 3, 3), Tensor([1.0], device), 0.0, 1)


def test_memory_that_is_not_there(device):
    with pytest.raises(DeviceError, match=r"no memory for .* in use"):
        device.allocate(1 << 50)


def test_memory_comes_back_to_the_pool(device):
    first = device.allocate(4096)
    address = first.int_ptr
    del first
    assert device.allocate(4096).int_ptr == address


def test_peak_bytes_count_every_kind_of_buffer(device):
    gc.collect()
    device.memory.release_unused()
    before, peak = device.active_bytes, device.peak_bytes
    size = max(peak, 1 << 20) // 4 * 4
    kept = [Tensor(np.zeros(size // 4, np.float32), device), device.allocate(size)]
    assert device.active_bytes >= before + 2 * size
    assert device.peak_bytes >= peak + size
    kept.clear()
    device.finish()
    assert device.active_bytes <= before + 64


def test_uploads_do_not_keep_the_callers_array(device):
    array = np.arange(1000, dtype=np.float32)
    tensors = [Tensor(array, device) for _ in range(5)]
    array[:] = -1
    assert all(np.array_equal(t.numpy(), np.arange(1000)) for t in tensors)


def test_grids_cover_every_element_once(device):
    for count in (1, 63, 64, 65, 8192, 8193, 100_003):
        x = Tensor(np.zeros(count), device)
        ones = Tensor(np.ones(count), device)
        device.launch(device.kernel("elementwise", "add_into"), *device.grid(count), x, ones, count)
        assert np.array_equal(x.numpy(), np.ones(count))


def test_importing_the_engine_does_not_load_opencl():
    code = "import sys, clcomm.engine, clcomm.optim, models; sys.exit('pyopencl' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0


def test_a_repeated_launch_sets_what_changed_and_is_recorded_as_any_other(device):
    repeated, count = device.repeated_launch(), 37
    values = [np.random.default_rng(seed).standard_normal(count).astype(np.float32) for seed in range(3)]
    kernel = device.kernel("optim", "sgd")
    for number, (gradient, rate, decay) in enumerate([(1, 0.5, 0.0), (1, 0.25, 0.0), (2, 0.25, 0.0), (2, 0.25, 0.125)]):
        ours, theirs = device.upload(values[0]), device.upload(values[0])
        arguments = device.upload(values[gradient]), 0, rate, decay, 0, count
        repeated(kernel, *device.grid(count), ours, *arguments)
        device.launch(kernel, *device.grid(count), theirs, *arguments)
        found = [np.empty(count, np.float32) for _ in range(2)]
        for buffer, array in zip((ours, theirs), found, strict=True):
            device.read(buffer, array)
        assert found[0].tobytes() == found[1].tobytes(), number
    with pytest.raises(Exception, match=r"(?i)argument|float|type|cast"):  # half of the arguments set
        repeated(kernel, *device.grid(count), theirs, device.upload(values[1]), 0, "none", 0.0, 0, count)
    repeated(kernel, *device.grid(count), ours, *arguments)
    device.launch(kernel, *device.grid(count), theirs, *arguments)
    for buffer, array in zip((ours, theirs), found, strict=True):
        device.read(buffer, array)
    assert found[0].tobytes() == found[1].tobytes()
    with device.profile() as timed:
        repeated(kernel, *device.grid(count), ours, *arguments)
    assert [launch.name for launch in timed.launches] == ["sgd"]


QUEUES_AND_ENDS = """
import atexit

import numpy as np

finished = []
atexit.register(lambda: print("complete" if finished[0].command_execution_status == 0 else "still computing"))

import pyopencl as cl

from clcomm.engine import Device, Linear, Tensor

device = Device.select("cpu", cores=2)
layer = Linear(2048, 2048, device=device)
y = Tensor(np.ones((2048, 2048), np.float32), device)
for _ in range(4):
    y = layer(y)
finished.append(cl.enqueue_marker(device.queue))
print("queued" if device.runs_in_caller or finished[0].command_execution_status != 0 else "early")
"""


def test_the_processs_end_waits_for_what_is_queued():
    """PoCL's threads crash in a compiler that the end of the process has taken apart."""
    ended = subprocess.run([sys.executable, "-c", QUEUES_AND_ENDS], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.split()[-1]) == (0, "complete"), ended.stderr
