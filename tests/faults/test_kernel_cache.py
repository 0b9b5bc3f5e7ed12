"""A damaged cache of kernels costs a build, not the run: PoCL itself ends the process over a file that is cut short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launch import HUNG_S, LAUNCHERS, ROOT

TRAINING = ["-m", "examples.mnist", "--data", "digits", "--model", "mlp", "--max-steps", "2", "--no-eval", "--quiet"]


def train(cache: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment |= {"POCL_CACHE_DIR": str(cache), "POCL_DEVICES": "basic"}
    done = subprocess.run(
        [sys.executable, *TRAINING], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HUNG_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_what_is_cut_short_is_built_again(tmp_path: Path) -> None:
    train(tmp_path)
    built = [*tmp_path.glob("**/*.so"), *tmp_path.glob("**/*.bc")]
    if not built:
        pytest.skip("no PoCL that keeps kernels in files")
    for number, path in enumerate(built):
        if number % 2:
            os.truncate(path, path.stat().st_size // 2)
    assert "damaged; building anew" in train(tmp_path)
    assert train(tmp_path) == ""
