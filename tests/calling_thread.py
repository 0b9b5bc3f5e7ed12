"""Tests of what runs only where kernels run in the calling thread, in a process on PoCL's driver without threads."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from clcomm.engine import Device

_ROOT = Path(__file__).parents[1]


def pass_in_the_calling_thread(device: Device, file: str, chosen: str) -> None:
    """Run a file's tests that `chosen`, as for pytest's -k, selects: all have to pass, and none may be skipped.

    Skips the calling test where the device under test is no CPU of PyPI's PoCL.
    """
    if not device.is_cpu or os.environ.get("CLCOMM_TEST_DEVICE") or not find_spec("pocl_binary_distribution"):
        pytest.skip("PyPI's PoCL is not installed, or another device is tested")
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, file], env={**os.environ, "POCL_DEVICES": "basic"},
        cwd=_ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "SKIPPED" not in done.stdout, done.stdout[-3000:]
