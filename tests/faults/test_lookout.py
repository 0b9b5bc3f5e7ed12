"""The host's lookout on its own: which of several ranks that died it names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

import clcomm.lookout_process as lookout
from tests.faults.launch import HUNG_S

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the lookout needs Linux")


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (0, 1, 2)])
def test_the_first_to_die_is_named_even_when_all_are_gone_before_anybody_looks(order):
    with ExitStack() as left:
        ranks = [left.enter_context(_sleeper()) for _ in order]
        watching = left.enter_context(_started([rank.pid for rank in ranks]))
        os.kill(watching.pid, signal.SIGSTOP)  # a busy machine
        for number in order:
            ranks[number].kill()
            ranks[number].wait()
        os.kill(watching.pid, signal.SIGCONT)
        said = watching.communicate(timeout=HUNG_S)[1]
    assert said.startswith(f"clcomm: rank {order[0]} died at step {order[0] + 1} ")
    assert said.count("\n") == 1


def test_who_leaves_on_purpose_is_not_named():
    with ExitStack() as left:
        ranks = [left.enter_context(_sleeper()) for _ in range(2)]
        watching = left.enter_context(_started([rank.pid for rank in ranks], state=lookout.LEAVING))
        for rank in ranks:
            rank.kill()
            rank.wait()
        assert watching.communicate(timeout=HUNG_S)[1] == ""


def _sleeper() -> subprocess.Popen:
    return subprocess.Popen(["sleep", str(HUNG_S)])


def _started(pids: list[int], state: int = lookout.RUNNING) -> subprocess.Popen:
    """Start a lookout over ranks 0, 1, … at steps 1, 2, …; it has begun to watch when this returns."""
    memory = os.memfd_create("records")
    for rank, pid in enumerate(pids):
        words = [0] * (lookout.RECORD_BYTES // 8)
        words[lookout.STATE], words[lookout.STEP], words[lookout.RANK], words[lookout.PID] = state, rank + 1, rank, pid
        os.write(memory, b"".join(word.to_bytes(8, sys.byteorder) for word in words))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", lookout.__file__, str(memory)],
        pass_fds=(memory,),
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(memory)
    while _watched_by(process.pid) < len(pids):
        assert process.poll() is None
    return process


def _watched_by(pid: int) -> int:
    """Return how many descriptors a process's epoll looks at."""
    listing = subprocess.run(["grep", "-hc", "^tfd:", "-r", f"/proc/{pid}/fdinfo"], capture_output=True, text=True)
    return max((int(line) for line in listing.stdout.split()), default=0)
