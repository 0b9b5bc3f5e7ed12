"""The processes on a job's hosts: what they do there, and hosts that are lost and answer again.

A launcher that starts them here stands for one that reaches other hosts; tests/multihost/test_lost_hosts.py has those.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clcomm.comm.watch import restarts, worlds
from clcomm.jobs.launch import hosts as module
from clcomm.jobs.launch.hosts import Hosts
from clcomm.jobs.launch.mpiexec import HostList
from tests.faults.replaced_ranks import until

#: In place of a host's name: how a launcher reaches it; a file that says so is asked at each start.
REACHED, GONE = 'exec "$@"', "echo no route to it >&2; exit 1"


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """One host, whose launcher runs the file `way`."""
    monkeypatch.setattr(module, "ASK_S", 0.05)
    monkeypatch.setattr(module, "RETRY_S", 0.1)
    (tmp_path / "way").write_text(REACHED)
    made = Hosts(HostList("far:2", ""), lambda ranks, hosts, file: ["sh", str(tmp_path / "way")])
    made.open(tmp_path / "job", os.environ)
    yield made
    made.close()


def agent_of(hosts: Hosts) -> int:
    return hosts._agents["far"]._process.pid


def rank(folder: Path, world: str) -> subprocess.Popen[bytes]:
    """Start a process that looks like a rank of a world."""
    told = {worlds.MEMORY: str(folder), restarts.RESTART: world}
    sleeps = [sys.executable, "-c", "import time; time.sleep(99)", "clcomm.jobs.launch.rank"]
    return subprocess.Popen(sleeps, env={**os.environ, **told})


def attend(hosts: Hosts, told: list[bytes]) -> bool:
    told += hosts.attend()
    return bool(told)


def test_it_passes_on_what_ranks_tell_and_stops_and_ends_them(hosts: Hosts, tmp_path: Path):
    folder, told = tmp_path / "job", []
    assert hosts.left == ["far"] and hosts.room(2) == 2 and hosts.used(1) == {"far"}
    assert worlds.tell(folder, worlds.COPIED, 0, 17)
    until(lambda: attend(hosts, told))
    assert told == [b"copied 0 17"]
    hosts.ask_to_stop(3)
    until(worlds.stop_sign(folder, 3).exists)
    ranks = [rank(folder, number) for number in ("3", "4")]
    assert worlds.tell(folder, worlds.STOPPED, 3)
    assert hosts.end(3, kills=True) == [b"stopped 3 0"]  # what was told before the end comes before the answer
    assert ranks[0].wait() == -signal.SIGKILL and ranks[1].poll() is None
    assert not worlds.stop_sign(folder, 3).exists()
    hosts.close()
    assert not folder.exists()
    ranks[1].kill()
    ranks[1].wait()


def test_where_clcomm_run_is_it_leaves_all_to_it(tmp_path: Path):
    worlds.describe(tmp_path, 1, 2)
    made = Hosts(HostList("here", ""), lambda ranks, hosts, file: ["env"])
    made.open(tmp_path, os.environ)
    assert made.left == ["here"] and not worlds.pipe(tmp_path).exists()
    made.close()
    assert worlds.is_described(tmp_path)


def test_a_process_that_is_killed_alone_is_started_again(hosts: Hosts):
    first = agent_of(hosts)
    os.kill(first, signal.SIGKILL)
    until(lambda: hosts.attend() or agent_of(hosts) != first)
    assert hosts.end(0, kills=True) == [] and hosts.left == ["far"]


def test_a_host_that_cannot_be_reached_is_lost_at_once_and_may_come_back(hosts: Hosts, tmp_path: Path, capfd):
    (tmp_path / "way").write_text(GONE)
    os.kill(agent_of(hosts), signal.SIGKILL)
    hosts.end(0, kills=True)
    assert hosts.left == [] and hosts.room(2) == 0 and hosts.used(2) == set()
    until(lambda: hosts.attend() or hosts._agents["far"].idle_s < 0.1)  # tried again, in vain
    waits = rank(tmp_path / "job", "3")
    (tmp_path / "way").write_text(REACHED)
    until(lambda: hosts.attend() or hosts.left)
    assert waits.wait() == -signal.SIGKILL  # it cannot belong to a world that still trains
    assert capfd.readouterr().err == (
        "clcomm run: host far is lost: no route to it\nclcomm run: host far answers again\n"
    )


def test_a_host_that_is_back_for_a_while_is_named_once(hosts: Hosts, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "STEADY_S", 0.5)
    assert hosts.returned(set()) == []  # it was never lost
    (tmp_path / "way").write_text(GONE)
    os.kill(agent_of(hosts), signal.SIGKILL)
    hosts.end(0, kills=True)
    assert hosts.left == [] and hosts.returned(set()) == []
    (tmp_path / "way").write_text(REACHED)
    until(lambda: hosts.attend() or hosts.left)
    began_s, found = time.monotonic(), list[str]()
    until(lambda: hosts.attend() or found.extend(hosts.returned(set())) or found)
    assert found == ["far"] and time.monotonic() - began_s >= 0.4
    assert hosts.returned(set()) == []  # if ranks cannot be started there, this is not tried for ever


def test_a_silent_host_is_lost_in_time(hosts: Hosts, capfd, monkeypatch):
    monkeypatch.setattr(module, "LOST_S", 1.0)
    os.kill(agent_of(hosts), signal.SIGSTOP)
    began_s = time.monotonic()
    until(lambda: hosts.attend() or not hosts.left)
    assert time.monotonic() - began_s >= module.LOST_S
    assert "clcomm run: host far is lost: no answer for 1 s\n" in capfd.readouterr().err


def test_one_that_asks_late_does_not_blame_the_host(hosts: Hosts, monkeypatch):
    """As where `clcomm run` is stopped for a while: answers that wait are heard first."""
    monkeypatch.setattr(module, "LOST_S", 1.0)
    until(lambda: hosts.attend() or hosts._agents["far"].is_asked)
    time.sleep(1.5 * module.LOST_S)
    hosts.attend()
    assert hosts.left == ["far"]


def test_no_named_hosts_are_no_limit():
    none = Hosts(HostList("", ""), lambda ranks, hosts, file: ["mpiexec", str(ranks), hosts, file])
    none.open(Path("/nonexistent"), os.environ)
    assert none.room(7) == 7 and none.used(7) == set() and none.launch(7) == ["mpiexec", "7", "", ""]
    assert none.end(0, kills=True) == none.attend() == none.descriptors == []
    none.close()
