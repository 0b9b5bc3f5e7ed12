"""DeviceManager: the devices that a process has, parts of them, and two runtimes side by side."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.engine import intel_runtime
from clcomm.parallel.devices import DeviceManager
from tests.helpers import cpu_device, one_line

ROOT = Path(__file__).resolve().parents[2]
#: Trains on the devices that the command line names, and prints whether the replicas are alike and the loss fell.
TRAIN = """
import sys
import numpy as np
from clcomm.parallel.devices import DeviceManager, data_parallel_step, prepare_replicas
from clcomm.engine import CrossEntropyLoss
from clcomm.optim import AdamW
from models import MLP

manager = DeviceManager(sys.argv[1].split(), parts=int(sys.argv[2]))
model = MLP((1, 4, 4), 3, device=manager.devices[0], seed=1)
replicas = prepare_replicas(model, manager.get_queues())
optimizers = [AdamW(params, 1e-2) for params in replicas]
rng = np.random.default_rng(0)
x, y = rng.standard_normal((10, 1, 4, 4)), rng.integers(0, 3, 10)
forward = lambda device, x, y, params: CrossEntropyLoss()(model(x), y)
losses = [data_parallel_step(forward, replicas, optimizers, (x, y)) for _ in range(20)]
bits = {b"".join(p.numpy().tobytes() for p in params) for params in replicas}
print(manager.num_devices(), len(bits), losses[-1] < 0.7 * losses[0], len({d.driver for d in manager.devices}))
"""


def trained_on(names: str, parts: int, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, names, str(parts)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_by_default_it_has_this_rank_s_device():
    manager = DeviceManager()
    assert manager.num_devices() == len(manager.get_queues()) >= 1
    assert [each.kind for each in manager.devices] == [manager.devices[0].kind] * manager.num_devices()


def test_a_name_given_twice_makes_two_queues():
    one, two = DeviceManager(["cpu:0", "cpu:0"]).devices
    assert one is not two and one.cl_device == two.cl_device and one.queue != two.queue
    kept = DeviceManager([cpu_device("cpu"), one.cl_device]).devices
    assert kept[0] is cpu_device("cpu") and kept[1].cl_device == one.cl_device


def test_sub_devices_train():
    # As many threads as a machine of four cores has.
    cores = {"POCL_DEVICES": "pthread", "POCL_MAX_PTHREAD_COUNT": "4", "POCL_CPU_MAX_CU_COUNT": "4"}
    assert trained_on("pthread", 3, **cores) == "3 1 True 1"


@pytest.mark.skipif(intel_runtime.library() is None, reason="Intel's runtime is not installed")
def test_two_runtimes_train_side_by_side():
    assert trained_on("cpu:0 intel", 1) == "2 1 True 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": ["gpu:97"]}, "device='gpu:97': expected one of "),
        ({"devices": ["no such platform"]}, "device='no such platform': expected one of "),
        ({"devices": []}, "devices: expected a list of devices or their names, got []"),
        ({"devices": "cpu"}, "devices: expected a list of devices or their names, got 'cpu'"),
        ({"devices": [3]}, "devices: expected Devices or names such as 'gpu:0', got 3"),
        ({"parts": 0}, "parts: expected a whole number of at least 1, got 0"),
        ({"parts": True}, "parts: expected a whole number of at least 1, got True"),
        ({"devices": ["cpu:0"], "parts": 5000}, "parts: expected at most "),
    ],
)
def test_devices_that_are_not_there(arguments, message):
    with pytest.raises((ArgumentError, DeviceError)) as caught:
        DeviceManager(**arguments)
    assert one_line(caught).startswith(message)
