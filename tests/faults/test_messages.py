"""Ranks that wait for a message that never comes: who is named, and how the job ends."""

from __future__ import annotations

import pytest

from tests.faults.launch import job

PREAMBLE = """
import os, time
import numpy as np
from clcomm import Communicator
comm = Communicator()
last = comm.size - 1
"""
#: What rank 0 does while the last rank never takes part, and how a message names it.
WAITS = {
    "recv": ("comm.recv(np.empty(3), last, 5)", "recv from rank {last} with tag 5"),
    "recv of a new array": ("comm.recv(None, last)", "recv from rank {last} with tag 0"),
    "irecv": ("comm.irecv(np.empty(3), last).wait()", "recv from rank {last} with tag 0"),
    "send of a long array": ("comm.send(np.ones(1 << 22), last)", "send to rank {last} with tag 0"),
    "sendrecv": ("comm.sendrecv(np.ones(3), last, 0, np.empty(3), last)", "recv from rank {last} with tag 0"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("call", "ranks"), list(zip(WAITS, (3, 2, 4, 2, 2), strict=True)))
def test_a_rank_that_never_sends_is_named(tmp_path, call, ranks):
    """Alone: the others, which compute, are not what the message waits for."""
    code, name = WAITS[call]
    limits = {"CLCOMM_STALL_WARNING_S": "1", "CLCOMM_TIMEOUT_S": "3"}
    script = f"{code} if comm.rank == 0 else time.sleep(300)\n"
    ended = job(tmp_path, script, preamble=PREAMBLE, ranks=ranks, **limits)
    lines = ended.clcomm_lines()
    assert ended.code == 124 and not ended.out and "Traceback" not in ended.err, ended.err
    ends = [line for line in lines if "the job ends; what" in line]
    assert len(ends) == 1 and name.format(last=ranks - 1) in ends[0], ended.err
    assert f"missing: rank {ranks - 1} (in no collective but at " in ends[0] and ends[0].count("(in no") == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("end", "reason"),
    {
        "pass": "left while rank 0 waits for it in recv from rank 1 with tag 0",
        "os.kill(os.getpid(), 9)": "rank 1 died of SIGKILL",
        "1 / 0": "ZeroDivisionError",
        "raise SystemExit(3)": "3",
    }.items(),
)
def test_a_rank_that_ends_while_another_waits_for_its_message_ends_the_job(tmp_path, end, reason):
    script = f"comm.recv(np.empty(3), last) if comm.rank == 0 else None\n{end}\n"
    ended = job(tmp_path, script, preamble=PREAMBLE, ranks=2)
    assert ended.code not in (0, 124) and reason in ended.err and "rank 1" in ended.err, ended.err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["np.ones(4)", "np.ones(3, np.float32)", "np.ones((3, 1))", "np.ones(30_000)"])
def test_a_message_of_another_kind_ends_the_job_in_one_line(tmp_path, kind):
    script = f"""
from clcomm.comm.watch.endings import run
run(lambda: comm.send({kind}, 0) if comm.rank else comm.recv(np.empty(3), last))
"""
    ended = job(tmp_path, script, preamble=PREAMBLE, ranks=2)
    (line,) = ended.clcomm_lines()
    assert ended.code == 2 and "rank 0" in line and "recv: expected float64 [3] on rank 0, got float" in line
    assert "from rank 1; send and receive equal shapes and dtypes" in line and "Traceback" not in ended.err
