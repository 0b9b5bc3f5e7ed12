"""Jobs of their own for the files other_devices.py: PyTorch makes a device's threads at a process's first backward."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.faults.launch import HUNG_S, ROOT, clean_environment, mpiexec

pytest.importorskip("torch", reason="PyTorch is not installed")

FILES = [f"tests/{folder}/other_devices.py" for folder in ("torch", "horovod")]
DEVICES = [
    pytest.param("private", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")),
    pytest.param("ocl", marks=pytest.mark.skipif(find_spec("pytorch_ocl") is None, reason="no pytorch_ocl")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_on_ranks(ranks, device):
    tests = ["-m", "mpi4py", "-m", "pytest", "--with-mpi", "-x", "-p", "no:cacheprovider"]
    command = [mpiexec(), "-n", str(ranks), sys.executable, *tests, *FILES]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # pytorch_ocl's build among them
    # pytorch_ocl's cache locks the other ranks out.
    environment = clean_environment(OTHER_DEVICE=device, DLPRIM_CACHE_DISABLE="1", PYTHONPATH=paths)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True,
                           timeout=3 * HUNG_S, check=False)  # fmt: skip
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-3000:]
