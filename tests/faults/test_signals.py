"""SIGTERM and Ctrl-C end all ranks of a job, in any state of theirs."""

from __future__ import annotations

import re

import pytest

from tests.faults.failing import on_all, on_one
from tests.faults.launch import END_S, interrupt_when_ready, job, start


@pytest.mark.parametrize("does", ["time.sleep(60)", "comm.barrier()"], ids=["computes", "waits in MPI"])
def test_sigterm_on_one_rank_ends_all(tmp_path, does):
    ender = "threading.Timer(0.5, os.kill, (os.getpid(), 15)).start()"
    script = "import threading\n" + on_one(f"{ender}\n        failing()\n        {does}")
    ended = job(tmp_path, "time.sleep(60)".join(script.rsplit("comm.barrier()", 1)))  # the other ranks' state
    assert ended.code == 143
    assert ended.after_failing_s < END_S
    assert ended.clcomm_lines() == ["clcomm: rank 1: ended by SIGTERM"]


@pytest.mark.parametrize("does", ["time.sleep(60)", "while True: comm.barrier()"], ids=["computes", "waits in MPI"])
def test_sigterm_on_all_ranks_at_once_is_told(tmp_path, does):
    ender = "threading.Timer(0.3, os.kill, (os.getpid(), 15)).start()"
    ended = job(tmp_path, "import threading\n" + on_all(f"{ender}\n    failing()\n    {does}", "main()"))
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    lines = ended.clcomm_lines()
    assert lines
    assert all(re.fullmatch(r"clcomm: (rank \d: )?ended by SIGTERM", line) for line in lines)


SLEEPS = """
def main():
    comm = Communicator()
    ready()
    time.sleep(60)

{call}
"""

ONE_SLEEPS = """
def main():
    comm = Communicator()
    ready()
    if comm.rank == 1:
        time.sleep(60)
    comm.barrier()

{call}
"""


@pytest.mark.parametrize("call", ["run(main)", "main()"], ids=["run", "plain script"])
@pytest.mark.parametrize("script", [SLEEPS, ONE_SLEEPS], ids=["all compute", "two wait for one"])
def test_ctrl_c_ends_a_job_cleanly(tmp_path, script, call):
    ended = interrupt_when_ready(start(tmp_path, script.format(call=call)), ready_ranks=3)
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    assert "Traceback" not in ended.err
    assert "KeyboardInterrupt" not in ended.err
    assert len(ended.clcomm_lines()) <= 1


def test_ctrl_c_without_mpiexec(tmp_path):
    process = start(tmp_path, SLEEPS.format(call="run(main)"), launcher=False)
    ended = interrupt_when_ready(process, ready_ranks=1)
    assert (ended.code, ended.err) == (130, "clcomm: interrupted\n")
