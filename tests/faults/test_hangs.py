"""A rank that never enters a collective: the job reports its number and location, ends in time, and dumps all ranks."""

from __future__ import annotations

import json
import re

import pytest

from tests.faults.launch import job

#: Seconds in one collective after which the job has to end.
LIMIT_S = 2.0
HANGING = """
import signal
import numpy as np

def away():
    failing()
    {does}

def main():
    comm = Communicator(stall_warning_s=0.5, timeout_s={limit_s}, transport={transport!r})
    gradients = comm.allocate(4000).view(np.float32)
    for bucket in range(3):
        comm.all_reduce(gradients, "mean", label="gradients", bucket=bucket)
    comm.rendezvous()
    comm.lifetime.watchdog.look(None)  # so that everyone's place is known
    if comm.rank == 1:
        away()
    comm.all_reduce(gradients, "mean", label="gradients", bucket=3)

run(main)
"""


@pytest.mark.parametrize(
    "does, transport, is_where",
    [
        ("time.sleep(60)", "auto", r"in no collective but at \S+job\.py:\d+ in away"),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "mpi",
            r"stopped by SIGSTOP or a debugger, was in no collective but at \S+job\.py:\d+ in ",
        ),
    ],
    ids=["elsewhere", "stopped"],
)
def test_a_rank_that_never_comes_is_named_and_the_job_ends(tmp_path, does, transport, is_where) -> None:
    script = HANGING.format(does=does, limit_s=LIMIT_S, transport=transport)
    ended = job(tmp_path, script, CLCOMM_DUMP_DIR=str(tmp_path))
    assert ended.code == 124
    lines = [line for line in ended.clcomm_lines() if "create their Communicator" not in line]
    # Ranks 0 and 2 arrive in any order, and so do their lines.
    stall = r"clcomm: rank [02] has waited ([\d.]+) s in all_reduce 'gradients' #4 \(mean of 1,000 float32, bucket 3"
    for end, least_s in (("after 2 s the job ends$", 0.5), ("the limit is 2 s, the job ends; what each", LIMIT_S)):
        told = [re.search(rf"^{stall}.*; missing: .*\brank 1 \({is_where}.*; {end}", line) for line in lines]
        assert any(match and float(match[1]) >= least_s for match in told), lines
    (folder,) = tmp_path.glob("clcomm-dump-*")
    dumped = {path.name: json.loads(path.read_text()) for path in folder.glob("rank-*.json")}
    assert {"rank-0.json", "rank-2.json"} <= set(dumped)
    assert [event["bucket"] for event in dumped["rank-2.json"]["operations"]] == [0, 1, 2]
    assert any("in main" in line for line in dumped["rank-0.json"]["stack"])
    assert any(line.startswith("clcomm: rank 2, last operations: #1 all_reduce 'gradients' bucket 0") for line in lines)
