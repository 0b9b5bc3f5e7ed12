"""Ranks whose launcher was killed end by themselves, and their checkpoint is free for the job that follows."""

from __future__ import annotations

import os
import signal
import time

import pytest

from clcomm.lookout_process import launcher_of, stat_fields
from tests.faults.launch import start

#: How long ranks without a launcher may stay on a busy machine.
GONE_S = 15.0
TRAINING = """
import numpy as np
from clcomm.checkpoint import Checkpoint
from clcomm.checkpoint_series import CheckpointSeries
comm = Communicator()
series = CheckpointSeries(comm, os.environ["CLCOMM_TEST_DIR"] + "/run.npz", background=True)
for step in range(3000):
    if os.environ["CLCOMM_TEST_STUCK"] and comm.rank == 1:
        time.sleep(1000)
    comm.all_reduce(np.ones(3))
    series.save(Checkpoint(facts={"step": step}) if comm.rank == 0 else None)
    if step == 0:
        sys.stdout.write(f"rank {os.getpid()}\\n")
        sys.stdout.flush()
    time.sleep(0.05)
"""


def ranks_below(pid: int) -> list[int]:
    """Return the processes whose launcher is below this process, or is it."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        above = int(entry)
        while above > 1 and above != pid:
            fields = stat_fields(above)
            above = int(fields[1]) if fields else 0
        if above == pid and launcher_of(int(entry)) and int(entry) != pid:
            found.append(int(entry))
    return found


@pytest.mark.parametrize("stuck", ["", "1"], ids=["working", "one rank stuck"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_without_a_launcher_end(tmp_path, ranks, stuck):
    if ranks == 1 and stuck:
        pytest.skip("a rank that is alone waits for nobody")
    process = start(tmp_path, TRAINING, ranks=ranks, CLCOMM_TEST_DIR=str(tmp_path), CLCOMM_TEST_STUCK=stuck)
    assert process.stdout is not None
    if stuck:
        time.sleep(3)
    else:
        for _ in range(ranks):
            assert process.stdout.readline().startswith("rank ")
    pythons = ranks_below(process.pid)
    launchers = {launcher_of(pid) for pid in pythons}
    assert len(pythons) >= ranks
    for pid in {process.pid, *launchers}:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE_S
    left = pythons
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if (stat_fields(pid) or ["Z"])[0] != "Z"]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert left == []
