"""`clcomm run --min-ranks` where machines are lost: who goes on, from whose memory, and with which bits."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.faults.killed_shards import LIMIT_S
from tests.faults.launch import HUNG_S, mpiexec
from tests.faults.replaced_ranks import until
from tests.multihost.cable import NO_LIMITS, Link
from tests.multihost.lost_hosts import LostRun, undisturbed
from tests.multihost.machines import Machines, refusal


@pytest.fixture
def machines(request):
    """Three of them; a test's parameter is the link of the last."""
    mpiexec()
    reason = refusal()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    with Machines(3, getattr(request, "param", NO_LIMITS)) as made:
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


#: Trains under a policy until a file beside it is there; rank 0 writes all ranks' digests after an outer step, of what
#: is then alike on all.
RARE = """
import hashlib, json, os, sys
from training.options import TrainingOptions
from training.session import Session
from training.trainer import Callback

class Ends(Callback):
    def step_finished(self, record):
        if record.step % 5 or not session.comm.broadcast_object(os.path.exists(__file__ + ".end")):
            return
        trainer = session.trainer
        kept = trainer.sync.state_dict(trainer.model)
        arrays = trainer.model.state_dict() | {name: kept[name] for name in ("anchor", "velocity") if name in kept}
        digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()
        found = session.comm.all_gather_object((digest, record.step))
        if session.comm.rank == 0:
            with open(__file__ + ".found", "w") as file:
                json.dump(found, file)
        sys.exit(0)

session = Session(TrainingOptions(
    model="mlp", data="digits", batch_size=8, epochs=10**6, eval=False, quiet=True, policy=sys.argv[1],
    memory_checkpoint_every=1,
))
session.trainer.callbacks.append(Ends())
session.run()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "policy"),
    [(NO_LIMITS, "diloco:h=5"), (Link(50, 10), "sparseloco:h=5"), (Link(50, 10), "local:h=5")],
    indirect=["machines"], ids=str,
)  # fmt: skip
def test_a_site_that_is_cut_off_for_a_while_catches_up_under_a_policy(machines, tmp_path, policy):
    """The others go on without it, and when it is back it takes part again, from their state."""
    script = tmp_path / "rare.py"
    script.write_text(RARE)
    run = LostRun(machines, tmp_path / "run.npz", (0, 1, 2), script=(str(script), policy))
    first, site = machines.addresses[0], machines.addresses[2]
    before = run.until_copy(3)
    machines.cut(site)
    until(lambda: run.copied(first) > before + 20, LIMIT_S)
    assert run.copied(site) < run.copied(first) - 10
    machines.mend(site)
    mended = run.copied(first)
    until(lambda: run.copied(site) > mended, LIMIT_S)
    script.with_name("rare.py.end").touch()
    _, said = run.process.communicate(timeout=HUNG_S)
    assert run.process.returncode == 0, said
    assert f"host {site} is lost: no answer for 10 s" in said and "with 2 ranks (restart 1)" in said, said
    assert f"{site} answered for 10 s; 2 ranks end at their next copy" in said, said
    assert re.search(r"2 ranks have ended at step \d+, 3 go on", said), said
    found = json.loads(script.with_name("rare.py.found").read_text())
    assert len(found) == 3 and found[0] == found[1] == found[2] and found[0][1] > mended


@pytest.mark.slow
def test_where_clcomm_runs_own_machine_is_lost_the_job_ends_everywhere(machines, tmp_path):
    run = LostRun(machines, tmp_path / "run.npz", (1, 2), epochs=6)
    run.until_copy(2)
    machines.kill(machines.addresses[0])
    run.process.communicate(timeout=HUNG_S)
    for address in machines.addresses[1:]:
        ranks = machines.enter(address, "pgrep", "-f", "clcomm.jobs.launch.rank")
        until(lambda: subprocess.run(ranks, capture_output=True, check=False).returncode == 1)  # noqa: B023
