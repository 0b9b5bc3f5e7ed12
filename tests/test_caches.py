"""The suite leaves the user's caches alone."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.caches import CACHES, VARIABLES
from tests.faults.launch import ROOT

#: Tests that build kernels, read tuned sizes and start a job of their own.
SAMPLE = ("tests/engine/test_activation.py", "tests/engine/test_tuning.py", "tests/faults/test_bad_input.py")


def test_nothing_is_written_to_the_users_caches(tmp_path):
    """Kernels are built where the suite says, whatever the user's variables and home are."""
    home, common = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(common), "POCL_CACHE_DIR": str(tmp_path / "pocl")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "relu or stored or bucket", *SAMPLE]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["home"] and not list(home.iterdir())


def test_jobs_that_tests_start_use_them_too():
    script = (
        "import sys; from clcomm.base.storage import private; print(private.cache_directory(), sys.dont_write_bytecode)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == f"{CACHES / 'clcomm'} False"
