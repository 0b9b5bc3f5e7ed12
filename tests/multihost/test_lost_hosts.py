"""`clcomm run --min-ranks` where machines are lost: who goes on, from whose memory, and with which bits."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from tests.faults.launch import HUNG_S, mpiexec
from tests.faults.replaced_ranks import until
from tests.multihost.lost_hosts import LostRun, undisturbed
from tests.multihost.machines import Machines, refusal


@pytest.fixture
def machines():
    mpiexec()
    reason = refusal()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    with Machines(3) as made:
        yield made


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("order", "victim", "is_silent"), [((1, 0, 2), 1, True), ((0, 1, 2), 2, False)], ids=["silent, of rank 0", "told"]
)
def test_those_that_are_left_go_on_from_their_memory(machines, tmp_path, order, victim, is_silent):
    """The checkpoint's file is written at the end alone, so the disk has nothing to go on from."""
    run = LostRun(machines, tmp_path / "run.npz", order)
    run.until_copy(3)
    loss = run.lose(victim, is_silent)
    found, said = run.end()
    assert found == undisturbed(tmp_path), said
    assert loss.again <= 2  # the step in which it was lost, and one whose copy was being written
    reason = "no answer for 10 s" if is_silent else "connect to host "
    assert f"clcomm run: host {machines.addresses[victim]} is lost: {reason}" in said
    assert "with 2 ranks (restart 1)" in said
    for address in (machines.addresses[each] for each in order if each != victim):
        assert not list(machines.memory(address).glob("clcomm-*"))
    waits = machines.enter(machines.addresses[0], "pgrep", "-f", "remote_shell.py -")
    assert subprocess.run(waits, check=False).returncode == 1, "a connection with the lost machine is left"


def test_too_few_that_are_left_end_the_job_with_one_line(machines, tmp_path):
    run = LostRun(machines, tmp_path / "run.npz", (0, 1), run=("--min-ranks", "2"))
    run.until_copy(1)
    machines.kill(machines.addresses[1])
    found, said = run.end()
    assert found == "" and run.process.returncode not in (0, None), said
    last = said.splitlines()[-1]
    assert last.startswith("clcomm run: exit code ")
    assert last.endswith("giving up: the hosts that answer (10.79.0.1) have room for 1 of the 2 --min-ranks")


#: Takes steps until a file beside it is there.
STEPS = """
import os, sys, time
from clcomm import Communicator
from clcomm.checkpoint import Checkpoint
from clcomm.checkpoint.memory import MemoryCopies

comm = Communicator()
copies = MemoryCopies(comm, 1)
copy = copies.newest()
step = copy.facts["copied"] if copy else 0
while not comm.broadcast_object(os.path.exists(__file__ + ".end")):
    step += 1
    time.sleep(0.02)
    if copies.save(Checkpoint(), step, time.monotonic()):
        sys.exit(0)
"""


@pytest.mark.slow
def test_a_machine_that_is_back_is_used_at_the_next_resize(machines, tmp_path):
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    run = LostRun(machines, tmp_path / "run.npz", (0, 1, 2), script=str(script))
    run.until_copy(2)
    run.lose(2, is_silent=True)
    machines.start(machines.addresses[2])
    until(lambda: list(machines.memory(machines.addresses[2]).glob("clcomm-memory-*/words")))
    time.sleep(1.0)  # its answer is on the way
    resize = machines.enter(machines.addresses[0], sys.executable, "-m", "clcomm", "run", "--resize", "3")
    asked = subprocess.run(resize, env=machines.environment(), capture_output=True, text=True, timeout=HUNG_S)
    assert asked.returncode == 0, asked.stderr
    until(lambda: run.copied(machines.addresses[2]))
    script.with_name("steps.py.end").touch()
    _, said = run.process.communicate(timeout=HUNG_S)
    assert run.process.returncode == 0 and "host 10.79.0.3 answers again\n" in said, said
    assert re.search(r"2 ranks have ended at step \d+, 3 go on", said), said


@pytest.mark.slow
def test_where_clcomm_runs_own_machine_is_lost_the_job_ends_everywhere(machines, tmp_path):
    run = LostRun(machines, tmp_path / "run.npz", (1, 2), epochs=6)
    run.until_copy(2)
    machines.kill(machines.addresses[0])
    run.process.communicate(timeout=HUNG_S)
    for address in machines.addresses[1:]:
        ranks = machines.enter(address, "pgrep", "-f", "clcomm.launch.rank")
        until(lambda: subprocess.run(ranks, capture_output=True, check=False).returncode == 1)  # noqa: B023
