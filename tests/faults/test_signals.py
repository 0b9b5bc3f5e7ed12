"""SIGTERM and Ctrl-C end all ranks of a job, in any state of theirs."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.failing import on_all, on_one
from tests.faults.launch import (
    END_S,
    PREAMBLE,
    clean_environment,
    finish,
    interrupt_when_ready,
    job,
    mpiexec,
    start,
)
from tests.leftovers import children


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


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(int(os.environ.get("CLCOMM_SIGNALS", "12"))))
def test_a_signal_that_is_repeated_does_not_change_the_exit_code(tmp_path, seed):
    """To the ranks of a launcher; to `clcomm run`, its launcher, its ranks, and all of them."""
    rng = random.Random(seed)
    number, apart_s = rng.choice((signal.SIGTERM, signal.SIGINT)), 0.005 * 400 ** rng.random()
    under_run, call = rng.random() < 0.7, rng.choice(("run(main)", "main()"))
    to = rng.choice(("ranks", "launcher", "group", "clcomm run")) if under_run else "ranks"
    script = SLEEPS.replace("ready()", 'sys.stdout.write(f"{os.getpid()} {os.getppid()}\\n"); sys.stdout.flush()')
    path = tmp_path / "job.py"
    path.write_text(PREAMBLE + script.replace("{call}", call))
    run = [sys.executable, "-m", "clcomm", "run", "-n", "2"] if under_run else [mpiexec(), "-n", "2", sys.executable]
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *run, str(path)], env=clean_environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    places = [tuple(map(int, process.stdout.readline().split())) for _ in range(2)]
    time.sleep(0.3)  # into the sleep
    launcher = [each for each in children(process.pid) if "-n" in Path(f"/proc/{each}/cmdline").read_text().split("\0")]
    targets = {
        "ranks": [rank for rank, _ in places], "launcher": launcher, "group": [-process.pid],
        "clcomm run": [process.pid],
    }[to]  # fmt: skip
    for _ in range(2):
        for each in targets:
            with suppress(ProcessLookupError):
                os.kill(each, number) if each > 0 else os.killpg(-each, number)
        time.sleep(apart_s)
    ended = finish(process)
    case = f"{number.name} {apart_s * 1e3:.0f} ms apart to {to}, {call}, under {run[2]}: {ended.err}"
    assert ended.code == 128 + number, case
    assert "Traceback" not in ended.err, case


def test_ctrl_c_without_mpiexec(tmp_path):
    process = start(tmp_path, SLEEPS.format(call="run(main)"), launcher=False)
    ended = interrupt_when_ready(process, ready_ranks=1)
    assert (ended.code, ended.err) == (130, "clcomm: interrupted\n")
