"""Ranks whose launcher was killed end by themselves, and the next job can use their checkpoint."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from clcomm.base.errors import name_ranks
from clcomm.base.host.host_processes import stat_fields
from clcomm.base.host.rank_process import ancestors
from clcomm.comm.watch import exit_monitor
from clcomm.comm.watch.exit_monitor_process import PID, RANK, RECORD_BYTES
from tests.faults.launch import start

#: How long ranks without a launcher may run on a busy machine.
GONE_S = 15.0
TRAINING = """
import numpy as np
from clcomm.jobs.checkpoint import Checkpoint
from training.checkpoint_series import CheckpointSeries
if os.environ["CLCOMM_TEST_STUCK"] == "before":
    sys.stdout.write("rank 0\\n")
    sys.stdout.flush()
    time.sleep(1000)
comm = Communicator()
series = CheckpointSeries(comm, os.environ["CLCOMM_TEST_DIR"] + "/run.npz", background=True)
for step in range(3000):
    if os.environ["CLCOMM_TEST_STUCK"] == "1" and comm.rank == 1:
        time.sleep(1000)
    comm.all_reduce(np.ones(3))
    series.save(Checkpoint(facts={"step": step}) if comm.rank == 0 else None)
    if step == 0:
        sys.stdout.write(f"rank {os.getpid()}\\n")
        sys.stdout.flush()
    time.sleep(0.05)
"""


def ranks_below(pid: int) -> list[int]:
    """Return the descendants of a process that run under a launcher."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        above = int(entry)
        while above > 1 and above != pid:
            fields = stat_fields(above)
            above = int(fields[1]) if fields else 0
        if above == pid and ancestors(int(entry))[1] and int(entry) != pid:
            found.append(int(entry))
    return found


@pytest.mark.parametrize(
    ("ranks", "stuck"),
    [(1, ""), (2, ""), (4, ""), (2, "1"), (4, "1"), (2, "before")],
    ids=["1 rank", "2 ranks", "4 ranks", "2 ranks, one stuck", "4 ranks, one stuck", "before their Communicator"],
)
def test_ranks_without_a_launcher_end(tmp_path, ranks, stuck):
    process = start(tmp_path, TRAINING, ranks=ranks, CLCOMM_TEST_DIR=str(tmp_path), CLCOMM_TEST_STUCK=stuck)
    assert process.stdout is not None
    if stuck == "1":
        time.sleep(3)
    else:
        for _ in range(ranks):
            assert process.stdout.readline().startswith("rank ")
    pythons = ranks_below(process.pid)
    launchers = {ancestors(pid)[1] for pid in pythons}
    assert len(pythons) >= ranks
    for pid in (*(launchers - {process.pid}), process.pid):  # else MPICH's proxies end the ranks
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


SLEEP = "import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("programs", [(SLEEP,), (SLEEP, SLEEP), (SLEEP, STUBBORN), (STUBBORN, STUBBORN)])
@pytest.mark.parametrize("launchers", [1, 2])
def test_the_exit_monitor_ends_ranks_without_a_launcher(programs, launchers, capfd):
    """SIGTERM first, then SIGKILL for the remaining ranks; without MPI."""
    with ExitStack() as opened:

        def run(program):
            process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
            opened.callback(process.communicate)
            opened.callback(process.kill)
            return process

        above, ranks = [run(SLEEP) for _ in range(launchers)], [run(program) for program in programs]
        time.sleep(1)  # until signals are ignored
        descriptor = os.memfd_create("records")
        opened.callback(os.close, descriptor)
        os.ftruncate(descriptor, len(ranks) * RECORD_BYTES)
        words = memoryview(mmap.mmap(descriptor, 0)).cast("q")
        for place, process in enumerate(ranks):
            words[place * RECORD_BYTES // 8 + PID], words[place * RECORD_BYTES // 8 + RANK] = process.pid, 7 + place
        found = exit_monitor.ends_of(
            [each.pid for each in ranks], [0] * len(ranks), opened, [each.pid for each in above]
        )
        if found is None:
            pytest.skip("the system has no pidfds")
        exit_monitor._start_host_monitor(descriptor, *found)
        above[-1].kill()
        codes = [process.wait(30) for process in ranks]
    assert codes == [-signal.SIGKILL if program == STUBBORN else -signal.SIGTERM for program in programs]
    deadline, said = time.monotonic() + 10, ""
    while "\n" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        time.sleep(0.05)
    named = name_ranks([7 + place for place in range(len(ranks))])
    assert said == f"clcomm: {named}: the launcher is gone; ended by the exit monitor\n"
