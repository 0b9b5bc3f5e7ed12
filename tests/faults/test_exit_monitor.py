"""The exit monitor on its own: it reports the first of several ranks that died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType

import pytest

import clcomm.comm.watch.exit_monitor_process as monitor
from clcomm.comm.watch import restarts
from clcomm.comm.watch.exit_monitor import ends_of
from tests.faults.launch import HUNG_S, clean_environment, mpiexec

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the exit monitor needs Linux")


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (0, 1, 2)])
def test_the_first_to_die_is_named_even_when_all_are_gone_before_anybody_looks(order):
    said = what_is_said(order, monitor.RUNNING)
    assert said.startswith(f"clcomm: rank {order[0]} died at step {order[0] + 1} ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGRTMIN, 37, 50, 63, signal.SIGRTMAX, signal.SIGXCPU])
def test_any_signal_has_a_name(number):
    """Real-time signals have no names of their own, except for the first and the last."""
    process = subprocess.Popen(["sleep", str(HUNG_S)])
    handle = os.pidfd_open(process.pid)
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    said = monitor.ended(monitor.exit_status(process.pid, handle), 0)
    process.wait()
    os.close(handle)
    names = {each.value: each.name for each in signal.Signals}
    assert said == f"died of {names.get(number, f'SIGRTMIN+{number - signal.SIGRTMIN}')}"


def test_no_number_of_a_signal_is_an_error():
    names = [monitor.signal_name(number) for number in range(200)]
    assert len(set(names)) == 200 and names[9] == "SIGKILL" and names[199] == "signal 199"


def test_a_rank_in_its_exit_handlers_is_not_named():
    assert what_is_said((1, 0), monitor.LEAVING) == ""


def test_a_rank_that_the_launcher_ends_after_one_that_died_in_its_exit_handlers_is_not_named():
    assert what_is_said((1, 0), monitor.RUNNING, {1: monitor.LEAVING}) == ""


def what_is_said(order: tuple[int, ...], state: int, others: Mapping[int, int] = MappingProxyType({})) -> str:
    """Return the exit monitor's output for ranks 0, 1, … at steps 1, 2, …, killed in this order before it starts.

    others: the ranks with another state.
    """
    with ExitStack() as left:
        ranks, pipes = [], []
        for _ in order:
            pipe = os.pipe()
            ranks.append(left.enter_context(subprocess.Popen(["sleep", str(HUNG_S)], pass_fds=pipe)))
            pipes.append(pipe[0])
            os.close(pipe[1])
            left.callback(os.close, pipe[0])
        ends, handles = ends_of([rank.pid for rank in ranks], pipes, left)
        for number in order:
            ranks[number].kill()
            if number in others:  # the launcher has not collected it yet
                os.waitid(os.P_PID, ranks[number].pid, os.WEXITED | os.WNOWAIT)
            else:
                ranks[number].wait()
        memory = os.memfd_create("records")
        left.callback(os.close, memory)
        for number, rank in enumerate(ranks):
            record = [0] * (monitor.RECORD_BYTES // 8)
            record[monitor.STATE], record[monitor.STEP] = others.get(number, state), number + 1
            record[monitor.RANK], record[monitor.PID] = number, rank.pid
            os.write(memory, array("q", record).tobytes())
        descriptors = [memory, ends.fileno(), *handles]
        command = [sys.executable, "-I", "-S", monitor.__file__, "host", *map(str, descriptors)]
        ended = subprocess.run(
            command, pass_fds=descriptors, stderr=subprocess.PIPE, text=True, timeout=HUNG_S, check=True
        )
        return ended.stderr


#: A rank that gets SIGTERM while another one of its host lives, or is dead.
SIGNALLED = """
import subprocess, sys
from clcomm.comm.watch import endings
from clcomm.comm.watch.exit_monitor_process import PID, RECORD_BYTES
from clcomm.comm.watch.job import this_job
other = subprocess.Popen(["sleep", "600"])
words = memoryview(bytearray(2 * RECORD_BYTES)).cast("q")
words[RECORD_BYTES // 8 + PID] = other.pid
this_job().record.join(words, 0, 0)
if sys.argv[1] == "dead":
    other.kill()
    other.wait()
endings.note_signal(15)
other.kill()
"""


@pytest.mark.parametrize(("other", "noted"), [("lives", signal.SIGTERM), ("dead", 0)])
def test_sigterm_after_another_ranks_death_is_the_launchers_and_no_cause(tmp_path, other, noted):
    """So `clcomm run` returns the code of what has killed the other one."""
    file = tmp_path / "progress"
    file.write_bytes(bytes(restarts.FILE_BYTES))
    environment = clean_environment(**{restarts.PROGRESS: str(file)})
    subprocess.run([sys.executable, "-c", SIGNALLED, other], env=environment, timeout=HUNG_S, check=True)
    assert restarts.read_progress(str(file))[restarts.SIGNAL] == noted


#: Ranks that still load their modules; one gets a signal.
LOADING = """
import os, signal, sys, time
from clcomm.base.host.launcher import launched_rank
from clcomm.jobs.launch import rank
rank.handle_signals(rank._end_at_once)
open(f"{sys.argv[1]}-{launched_rank()}", "w").close()
while not all(os.path.exists(f"{sys.argv[1]}-{each}") for each in range(2)):
    time.sleep(0.01)
if not launched_rank():
    os.kill(os.getpid(), int(sys.argv[2]))
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "noted"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGKILL, 0)])
def test_sigterm_while_ranks_load_is_no_cause_either_after_anothers_death(tmp_path, number, noted):
    file = tmp_path / "progress"
    file.write_bytes(bytes(restarts.FILE_BYTES))
    command = [mpiexec(), "-n", "2", sys.executable, "-c", LOADING, str(tmp_path / "loads"), str(int(number))]
    environment = clean_environment(**{restarts.PROGRESS: str(file)})
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=HUNG_S, check=False)
    assert ended.returncode and restarts.read_progress(str(file))[restarts.SIGNAL] == noted
