"""Some of PyTorch's own tests of backends, on 2 ranks; `make torch-suite` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.faults.launch import HUNG_S, ROOT, clean_environment, mpiexec

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("expecttest", reason="the extra torch-suite is not installed")

#: One of each kind: sums, copies, messages, groups, objects, futures, time-outs, DistributedDataParallel and its hooks.
TESTS = [
    "test_all_reduce_sum",
    "test_all_reduce_coalesced_sum",
    "test_reduce_min",
    "test_all_to_all_single_unequal_split",
    "test_broadcast",
    "test_scatter_full_group",
    "test_gather_object",
    "test_send_recv_any_source",
    "test_batch_isend_irecv_gloo",
    "test_isend",
    "test_get_future",
    "test_barrier_timeout_global",
    "test_barrier_timeout_full_group",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
]


@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_a_sample_passes(tmp_path, launcher):
    names = TESTS if launcher == "mpiexec" else TESTS[::3]
    kept = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "tests.torch.suite", "--ranks", "2", "--backends", "clcomm",
               "--launcher", mpiexec() if launcher == "mpiexec" else launcher,
               "--keep", str(kept), "--tests", *names]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True,
                           timeout=3 * HUNG_S, check=False)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (outcomes,) = json.loads(kept.read_text()).values()
    assert {name: outcomes.get(name) for name in names} == {name: ["pass", ""] for name in names}
