"""A sample of the combinations on eight ranks: data, tensor and pipeline parallel at once."""

from __future__ import annotations

import subprocess
import sys

from tests.faults.launch import ROOT, clean_environment, mpiexec

#: A GPT on dp=2 x tp=2 x pp=2.
_NUMBER = 10


def test_eight_ranks_train_as_one():
    test = f"tests/parallel/test_combinations.py::test_ranks_train_as_one_on_the_same_samples[{_NUMBER}]"
    python = [sys.executable, "-m", "mpi4py", "-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", test]
    environment = clean_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    ended = subprocess.run([mpiexec(), "-n", "8", *python], cwd=ROOT, env=environment, capture_output=True, text=True,
                           timeout=240, check=False)  # fmt: skip
    assert ended.returncode == 0 and "1 passed" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-2000:]
