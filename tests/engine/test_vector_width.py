"""The vectors of compiled products: as wide as the tile asks for, counted in the machine code that PoCL keeps."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys

import pytest

from clcomm.engine import tuning
from tests.faults.launch import ROOT
from tests.helpers import cpu_device

MULTIPLY = """
import sys
import numpy as np
from clcomm.engine import Device, Tensor
from clcomm.engine.ops.matmul import multiply
from clcomm.engine.tuning import Tuning

tile = tuple(map(int, sys.argv[1:]))
device = Device(Device.select("cpu").cl_device, tuning=Tuning(gemm_tile=tile))
a, out = (Tensor(np.ones((96, 96), np.float32), device) for _ in range(2))
multiply(a, a, out, transpose_b=True)
device.finish()
"""


@pytest.mark.parametrize("tile", tuning.CHOICES["cpu"]["gemm_tile"], ids=str)
def test_sums_lie_in_registers_of_the_tiles_width(tile, tmp_path) -> None:
    device = cpu_device("cpu").cl_device
    if not tuning.has_wide_vectors(device) or platform.machine() != "x86_64":
        pytest.skip("the CPU has no full-speed vectors of 16 floats")
    if shutil.which("objdump") is None:
        pytest.skip("no objdump to disassemble kernels with")
    environment = {**os.environ, "POCL_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", MULTIPLY, *map(str, tile)], env=environment, check=True, timeout=120)
    kernels = list(tmp_path.rglob("gemm/**/*.so"))
    if not kernels:
        pytest.skip("the driver keeps no machine code")
    code = "\n".join(
        subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        for path in kernels
    )
    used = set(re.findall(r"vfm\w+ps\s.*%([yz]mm)\d+$", code, re.MULTILINE))
    assert used == {"zmm" if tile[2] == 16 else "ymm"}
