"""`clcomm run --min-ranks`: killed ranks, other numbers of ranks, and copies in memory; the bits at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from clcomm.jobs.checkpoint import load
from clcomm.jobs.launch.mpiexec import MPICH, find_mpiexec
from tests.faults.launch import HUNG_S, ROOT, clean_environment, mpiexec
from tests.faults.replaced_ranks import Job, killed_run, until

#: Epochs of a job that ends before the next ranks are ready, of one that does not, and of one that is killed.
SHORT, LONG, ENDLESS = 40, 80, 10**6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[int], str]:
    """Return the hash of so many epochs on one rank."""
    mpiexec()  # skips where there is none
    found: dict[int, str] = {}

    def hash_of(epochs: int) -> str:
        if epochs not in found:
            found[epochs], _ = Job(tmp_path_factory.mktemp("run") / "run.npz", ranks=1, epochs=epochs).end()
        return found[epochs]

    return hash_of


def run(*arguments: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clcomm", "run", *arguments], env=clean_environment(**variables), cwd=folder,
        capture_output=True, text=True, timeout=HUNG_S,
    )  # fmt: skip


def copy_of(job: Job) -> Path:
    """Return the path of the copy in memory when there is one."""
    folder = job.folder()
    assert folder is not None
    copy = folder / "state-0.npz"
    until(copy.exists)
    return copy


def test_killed_ranks_are_replaced_and_the_bits_are_those_of_an_undisturbed_run(tmp_path, undisturbed):
    found, deaths = killed_run(tmp_path / "run.npz", 11, "250", SHORT)
    assert found == undisturbed(SHORT) and len(deaths) >= 2, deaths


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["diloco:h=7", "sparseloco:h=7", "streaming:h=8", "noloco:h=7"])
def test_a_killed_rank_under_a_policy_leaves_the_bits_of_an_undisturbed_run(tmp_path, policy):
    """Copies fall between outer steps too: moments, outer momentum and what was not sent yet are each rank's own."""
    mpiexec()
    undisturbed, _ = Job(tmp_path / "first.npz", ranks=3, epochs=4, policy=policy).end()
    job = Job(tmp_path / "run.npz", "--memory-checkpoint-every", "10", ranks=3, epochs=4, policy=policy)
    os.kill(job.until_step(75)[-1][1], signal.SIGKILL)
    found, said = job.end()
    assert "going on from step " in said and " with 3 ranks" in said, said
    assert found == undisturbed


def test_more_ranks_and_fewer_join_at_a_steps_end_and_the_disk_is_not_read(tmp_path, undisturbed):
    job = Job(tmp_path / "run.npz", "--checkpoint-every", "5", ranks=2, epochs=LONG)
    for ranks in (4, 3):
        world, process, _ = job.until_step(20)[-1]
        for file in tmp_path.glob("run.npz*"):
            file.write_bytes(b"another content")
        said = run("--resize", str(ranks), str(job.process.pid if ranks == 4 else process))
        assert (said.returncode, said.stdout) == (0, ""), said.stderr
        until(lambda: len([each for each in job.ranks() if each[0] > world]) == ranks)  # noqa: B023
    refused = run("--resize", "5")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "clcomm: --resize: expected 1 to 4 ranks, the job's bounds, got 5\n"
    found, said = job.end()
    assert found == undisturbed(LONG), said
    assert "2 ranks have ended at step" in said and "4 ranks have ended at step" in said


def test_a_death_within_a_copy_leaves_the_one_before(tmp_path, undisturbed):
    """Rank 0 is killed while a copy's file is incomplete, which is seen by its name; the next ranks start cold."""
    every = ("--memory-checkpoint-every", "1")
    job = Job(tmp_path / "run.npz", *every, ranks=2, run=("--no-spare",), epochs=SHORT)
    first = {"PMI_RANK=0", "OMPI_COMM_WORLD_RANK=0"}
    ranks = job.until_step(10)
    writer = next(
        process for _, process, _ in ranks if first & set(Path(f"/proc/{process}/environ").read_text().split("\0"))
    )
    copy = copy_of(job)

    def is_caught() -> bool:
        os.kill(writer, signal.SIGSTOP)
        time.sleep(0.01)  # all threads have stopped
        if list(copy.parent.glob(".state-0.npz.*.partial")):
            return True
        os.kill(writer, signal.SIGCONT)
        return False

    until(is_caught)
    assert not job.ranks(waiting=True)
    step = load(copy).facts["copied"]
    os.kill(writer, signal.SIGKILL)
    found, said = job.end()
    assert found == undisturbed(SHORT) and step > 0  # written in the background, some steps late
    assert f"going on from step {step} with 2 ranks (restart 1)" in said


def test_a_damaged_copy_is_not_used(tmp_path, undisturbed):
    job = Job(tmp_path / "run.npz", "--memory-checkpoint-every", "100000", ranks=2, epochs=SHORT)
    ranks, copy = job.until_step(30), copy_of(job)
    content = bytearray(copy.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    os.kill(ranks[0][1], signal.SIGKILL)
    found, said = job.end()
    assert found == undisturbed(SHORT) and "copy in memory: checkpoint" in said


def test_where_clcomm_run_is_killed_all_ranks_end_and_its_memory_is_removed(tmp_path):
    """Those that train, and those that wait."""
    job = Job(tmp_path / "run.npz", ranks=1, epochs=ENDLESS)
    trains, folder = job.until_step(5)[0][1], copy_of(job).parent
    waits = until(lambda: job.ranks(waiting=True))[0][1]
    try:
        job.process.kill()
        until(lambda: not any(os.path.exists(f"/proc/{each}") for each in (trains, waits)))
        until(lambda: not folder.exists())
    finally:
        for rank in (trains, waits):
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        job.process.communicate()


#: Ends with exit code 1 on more ranks than FITS, before any step.
NO_ROOM = """
import os, sys
if int(os.environ["WORLD_SIZE"]) > int(os.environ["FITS"]):
    sys.exit(1)
if os.environ["RANK"] == "0":
    print("trained on", os.environ["WORLD_SIZE"])
"""


@pytest.mark.parametrize(("fits", "code", "trained"), [(2, 0, "trained on 2\n"), (1, 1, "")])
def test_starts_without_room_have_fewer_ranks_down_to_the_least(tmp_path, fits, code, trained):
    mpiexec()
    (tmp_path / "train.py").write_text(NO_ROOM)
    arguments = ["-n", "3", "--min-ranks", "2", "--pause", "0.01", "train.py"]
    ended = run(*arguments, folder=tmp_path, FITS=str(fits))
    assert (ended.returncode, ended.stdout) == (code, trained), ended.stderr
    last = [line for line in ended.stderr.splitlines() if line.startswith("clcomm run: ")][-1]
    if code:
        assert last == "clcomm run: exit code 1; giving up: 2 ranks, the fewest of --min-ranks, came to no step"
    else:
        assert "going on from the start or the newest checkpoint with 2 ranks" in last


@pytest.mark.parametrize(("least", "code", "trained"), [(2, 0, "trained on 2\n"), (3, 1, "")])
def test_hosts_that_cannot_be_reached_are_left_out(tmp_path, least, code, trained):
    """MPICH's launcher gets a program that fails in place of ssh; tests/multihost has hosts that are lost later."""
    mpiexec()
    if find_mpiexec().kind != MPICH:
        pytest.skip("mpiexec is not MPICH's")
    (tmp_path / "train.py").write_text(NO_ROOM)
    hosts = ("--hosts", "localhost:2,far.invalid:2", "-n", "4", "--min-ranks", str(least))
    launcher = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": "/bin/false"}
    ended = run(*hosts, "train.py", folder=tmp_path, FITS="2", **launcher)
    assert (ended.returncode, ended.stdout) == (code, trained), ended.stderr
    lost, *others = [line for line in ended.stderr.splitlines() if line.startswith("clcomm run: ")]
    assert lost.startswith("clcomm run: host far.invalid is lost: ")
    few = "clcomm run: not started: the hosts that answer (localhost) have room for 2 of the 3 --min-ranks"
    assert others == ([few] if code else [])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-n", "4", "--min-ranks", "5", "train.py"], "-n: expected a number of ranks from 5 up, got 4"),
        (["-n", "4", "--max-ranks", "3", "train.py"], "-n: expected a number of ranks up to 3, got 4"),
        (["--min-ranks", "2", "--", "true"], "-n: expected the number of ranks with --min-ranks"),
        (["-n", "2", "--no-spare", "train.py"], "--no-spare: expected --min-ranks with it, got none"),
        (["--resize", "2", "1"], "--resize: expected the process of a clcomm run --min-ranks or of one of its ranks"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, arguments, error):
    mpiexec()
    (tmp_path / "train.py").write_text("")
    ended = run(*arguments, folder=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"clcomm: {error}") and ended.stderr.count("\n") == 1


#: A job whose rank 0 starts another one; what that has of its own, and what is left of the first one's copy.
WITHIN = """
import os, subprocess, sys, time
from clcomm import Communicator
from clcomm.jobs.checkpoint import Checkpoint
from clcomm.jobs.checkpoint.memory import MemoryCopies
from clcomm.comm.watch.endings import note_step, run

def main():
    comm = Communicator()
    copies = MemoryCopies(comm, every=1)
    copies.save(Checkpoint(facts={"of": "outer"}), 7, time.monotonic())
    copies.wait()
    comm.barrier()
    note_step(7)
    if comm.rank == 0:
        subprocess.run([*sys.argv[1:], sys.executable, "inner.py"], check=True)
    comm.barrier()
    print(copies.newest().facts["of"], flush=True)

run(main)
"""
INNER = """
import os, time
from clcomm import Communicator
from clcomm.jobs.checkpoint import Checkpoint
from clcomm.jobs.checkpoint.memory import MemoryCopies
from clcomm.comm.watch.endings import note_step, run
from clcomm.comm.watch.restarts import restart_number

def main():
    comm = Communicator()
    copies = MemoryCopies(comm, every=1)
    found = copies.is_on, copies.newest(), restart_number(), os.path.isdir(os.environ["CLCOMM_JOB_FOLDER"])
    note_step(99)
    if copies.is_on:
        copies.save(Checkpoint(facts={"of": "inner"}), 99, time.monotonic())
        copies.wait()
    if comm.rank == 0:
        open("found", "w").write(f"{comm.size} {found}")

run(main)
"""


@pytest.mark.parametrize("how", ["mpiexec", "clcomm run"])
def test_a_job_that_a_rank_starts_is_one_of_its_own(tmp_path: Path, how: str):
    (tmp_path / "outer.py").write_text(WITHIN)
    (tmp_path / "inner.py").write_text(INNER)
    inner = (
        [mpiexec(), "-n", "3"]
        if how == "mpiexec"
        else [sys.executable, "-m", "clcomm", "run", "--", mpiexec(), "-n", "3"]
    )
    ended = run("--min-ranks", "1", "--no-spare", "-n", "2", "outer.py", *inner, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    assert ended.stdout.split() == ["outer"] * 2
    assert (tmp_path / "found").read_text() == "3 (False, None, 0, True)"
