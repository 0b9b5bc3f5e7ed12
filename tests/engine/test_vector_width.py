"""The vectors of compiled kernels, as wide as the device's sizes ask for: read from PoCL's machine code."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.engine import tuning
from tests.faults.launch import ROOT
from tests.helpers import cpu_device

PREAMBLE = """
import sys
import numpy as np
from clcomm.engine import Device, Tensor
from clcomm.engine import functional as F
from clcomm.engine.tuning import Tuning

def tensor(*shape, needs=True):
    return Tensor(np.ones(shape, np.float32), device, requires_grad=needs)

def device_of(**sizes):
    return Device(Device.select("cpu").cl_device, tuning=Tuning(**sizes))
"""
PRODUCT = """
device = device_of(gemm_tile=tuple(map(int, sys.argv[1:])))
F.linear(tensor(96, 96, needs=False), tensor(96, 96, needs=False)).numpy()
"""
CONVOLUTION = """
device = device_of(conv_lanes=int(sys.argv[1]))
y = F.conv2d(tensor(64, 16, 14, 14), tensor(32, 16, 3, 3), tensor(32), padding=1)
y.backward(tensor(*y.shape, needs=False))
device.finish()
"""
LOOPS = """
device = device_of(loop_lanes=int(sys.argv[1]))
x = tensor(4096)
F.sum(x * x + F.relu(x)).backward()
device.finish()
"""


def registers(
    program: str, sizes: tuple[int, ...], kernels: tuple[str, ...], cache: Path, instruction: str = r"vfm\w+ps"
) -> dict[str, set[str]]:
    """Return the kinds of registers in which each kernel multiplies and adds, or runs another instruction.

    Skip where the code cannot be read.
    """
    if not tuning.has_wide_vectors(cpu_device("cpu").cl_device) or platform.machine() != "x86_64":
        pytest.skip("the CPU has no full-speed vectors of 16 floats")
    if shutil.which("objdump") is None:
        pytest.skip("no objdump to disassemble kernels with")
    environment = {**os.environ, "POCL_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PREAMBLE + program, *map(str, sizes)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    found = {name: list(cache.rglob(f"{name}/**/*.so")) for name in kernels}
    if not any(found.values()):
        pytest.skip("the driver keeps no machine code")
    return {name: set().union(*(_registers_of(path, instruction) for path in paths)) for name, paths in found.items()}


def _registers_of(path: Path, instruction: str) -> set[str]:
    code = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(rf"{instruction}\s.*%([yz]mm)\d+(?:{{.*)?$", code, re.MULTILINE))


@pytest.mark.parametrize("tile", [(6, 16, 8), (12, 32, 16)], ids=str)
def test_products_are_summed_in_registers_of_the_tiles_width(tile, tmp_path) -> None:
    assert registers(PRODUCT, tile, ("gemm",), tmp_path) == {"gemm": {"zmm" if tile[2] == 16 else "ymm"}}


@pytest.mark.parametrize("lanes", tuning.CHOICES["cpu"]["conv_lanes"])
def test_convolutions_are_summed_in_registers_of_their_width(lanes, tmp_path) -> None:
    kernels = ("convolve", "weight_gradient")
    expected = {"zmm" if lanes == 16 else "ymm"}
    assert registers(CONVOLUTION, (lanes,), kernels, tmp_path) == dict.fromkeys(kernels, expected)


@pytest.mark.parametrize("lanes", tuning.CHOICES["cpu"]["loop_lanes"])
def test_loops_over_elements_are_vectorised_in_their_width(lanes, tmp_path) -> None:
    kernels = ("mul", "add", "relu")
    found = registers(LOOPS, (lanes,), kernels, tmp_path, r"v(?:mul|add|cmp\w*|movu)ps")
    expected = {"zmm" if lanes == 16 else "ymm"}
    assert found == dict.fromkeys(kernels, expected)
