"""Every call that signals a process is listed, with how it knows that the process is its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.faults.launch import ROOT

#: Whom each call signals, and how it knows that the process is its own. A pidfd means one process for ever: the signal
#: of one that has ended reaches nobody. A process that its parent has not waited for keeps its number.
CALLS = """
clcomm/tools/doctor/guard.py main
    the doctor whose MPI hangs: it is this process's parent, asked just before
clcomm/comm/watch/chaos.py Injector._strike
    the rank itself, by clcomm run --chaos: its own number
clcomm/comm/watch/chaos.py _HOLD
    the rank, by clcomm run --chaos: a pidfd that the rank has opened of itself
clcomm/comm/watch/exit_monitor_process.py end
    ranks whose launcher is gone, or of which one has failed: pidfds; the process has the pipe that the rank
    has made
clcomm/comm/watch/exit_monitor_process.py end_other_hosts
    the launcher of a host, of a job on several: a pidfd; by its executable, and an ancestor of the ranks then
clcomm/comm/watch/exit_monitor_process.py is_collected
    nobody: signal 0 asks
clcomm/comm/watch/exit_monitor_process.py kill_if
    ranks, where one fails before MPI has started or MPI goes on without it: a pidfd, and then: a live
    launcher's child, of this job; or as old as the rank has written
clcomm/comm/watch/forced_end.py main
    a rank that does not end by itself: a pidfd that the rank has opened of itself
clcomm/comm/watch/termination_signals.py SignalHandlers._repeat
    the rank itself, by the signal that it got: its own number
clcomm/comm/watch/worlds.py running
    nobody: signal 0 asks
clcomm/jobs/launch/hosts.py Agent.close
    the connection to another host: this process's child
clcomm/jobs/launch/keeper_process.py _send
    what lives of a job that has ended: a pidfd, and then: the job's own mark is in its environment; and a
    child's children, which connect it with other hosts: a pidfd, and then: its parent, which has not been
    waited for
clcomm/jobs/launch/rank.py _end_at_once
    the rank itself, by the signal that it got: its own number
clcomm/jobs/launch/supervisor.py Supervisor._start
    the launcher: this process's child
clcomm/jobs/launch/supervisor.py Supervisor._ended
    the launcher: this process's child
clcomm/jobs/launch/supervisor.py Supervisor._forward
    the launcher: this process's child
clcomm/jobs/launch/world_supervisor.py World.end
    the launcher: this process's child
clcomm/jobs/launch/world_supervisor.py WorldSupervisor._start
    the launcher: this process's child
clcomm/jobs/launch/world_supervisor.py WorldSupervisor._watched
    the launcher: this process's child
clcomm/comm/transport/mpi_failures.py abort
    all ranks: MPI's own
clcomm/tools/verify/job.py watch
    the watched script's ranks: the process group of this process's child
training/trial.py try_job
    the ranks of a trial: the process group of this process's child
examples/one_idea/elastic.py main
    the rank itself: its own number
"""
PACKAGES = "clcomm", "models", "training", "examples"
#: Names of the functions and methods that signal a process, of os, signal, subprocess, multiprocessing and MPI.
SIGNALS = {
    "Abort", "kill", "killpg", "pidfd_send_signal", "pthread_kill", "raise_signal", "send_signal", "sigqueue",
    "terminate",
}  # fmt: skip
#: The same in a program that another process runs.
IN_TEXT = re.compile(rf"\b({'|'.join(SIGNALS)})\(|\b(p?kill|killall) +-")


def signalling(source: str) -> Iterator[str]:
    """Yield the functions and names, with those that they are in, whose code or text signals a process."""

    def walk(node: ast.AST, within: tuple[str, ...]) -> Iterator[str]:
        for each in ast.iter_child_nodes(node):
            inner = within
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*within, each.name)
            elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and not within:
                inner = (each.targets[0].id,)
            called = each.func if isinstance(each, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            is_text = isinstance(each, ast.Constant) and isinstance(each.value, str) and IN_TEXT.search(each.value)
            if name in SIGNALS or is_text:
                yield ".".join(within)
            yield from walk(each, inner)

    return walk(ast.parse(source), ())


def test_every_call_that_signals_a_process_is_in_the_table() -> None:
    found = {
        (str(path.relative_to(ROOT)), function)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for function in signalling(path.read_text())
    }
    assert found == set(re.findall(r"^([\w/.]+\.py) ([\w.]+)$", CALLS, re.MULTILINE))


def test_the_search_finds_what_it_looks_for() -> None:
    for call in ("os.kill(1, 9)", "child.terminate()", "killpg(1, 9)", "run(['sh', '-c', 'kill -9 1'])"):
        assert list(signalling(f"class A:\n    def b(self):\n        {call}")) == ["A.b"]
    assert list(signalling("TEXT = 'signal.pidfd_send_signal(1, 9)'")) == ["TEXT"]
    assert list(signalling("TEXT = 'died of kill'")) == []
