"""Two writers of one checkpoint: the file is complete at every moment, and the second job's error names the first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.base.storage.scratch import WriterLocks
from clcomm.comm.communicator import Communicator
from clcomm.jobs.checkpoint import load
from training.checkpoint_series import CheckpointSeries

#: How often the file is read while others write it.
READS = 250
HOLD = """
import sys, time
from pathlib import Path
from clcomm.base.storage.scratch import WriterLocks
locks = WriterLocks()
held = locks.acquire(Path(sys.argv[1]), 0)
print("held", flush=True)
time.sleep(60)
"""
WRITE = """
import sys
from pathlib import Path
import numpy as np
from clcomm.jobs.checkpoint import Checkpoint, save
from clcomm.base.errors import CheckpointWriteError
path, keep, refused, step = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), 0
while True:
    step += 1
    try:
        save(path, Checkpoint({"parameter/a": np.full(20_000, float(step))}, {"step": step}), keep=keep)
    except CheckpointWriteError as error:
        refused.write_text(str(error))
"""


@contextlib.contextmanager
def running(program: str, *arguments: object):
    """A Python program in a process of its own, which is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("keep", [1, 3])
def test_what_two_write_is_whole_whenever_it_is_read(tmp_path: Path, keep: int) -> None:
    """Both write as fast as they can, and one of them is killed and started again all the time."""
    path, refused = tmp_path / "run.npz", tmp_path / "refused"
    writer = WRITE, path, keep, refused
    with running(*writer) as first, contextlib.ExitStack() as others:
        other, reads, steps = others.enter_context(running(*writer)), 0, set()
        while not path.exists():
            time.sleep(0.01)
        while reads < READS or len(steps) < 10:
            found = load(path)  # raises where it is damaged
            assert (found.arrays["parameter/a"] == found.facts["step"]).all()
            steps.add(found.facts["step"])
            reads += 1
            if reads % 20 == 0:
                other.send_signal(signal.SIGKILL)
                other = others.enter_context(running(*writer))
        assert first.poll() is None and not refused.exists()


def test_a_second_job_gets_the_holders_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriterLocks.acquire, "__defaults__", (0.2,))
    path, comm = tmp_path / "run.npz", Communicator(transport="solo")
    with running(HOLD, path) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ArgumentError) as caught:
            CheckpointSeries(comm, path)
        host = os.uname().nodename
        assert str(caught.value).endswith(f"another job writes it (process {other.pid} on {host})")
        CheckpointSeries(comm, tmp_path / "other.npz").close()
    CheckpointSeries(comm, path).close()  # it was killed, and its lock with it
    assert os.listdir(tmp_path) == []


def test_a_job_waits_for_one_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    with running(HOLD.replace("60", "0.5"), path) as other:
        assert other.stdout.readline() == "held\n"
        locks = WriterLocks()
        locks.release(locks.acquire(path))


def test_one_job_may_hold_it_several_times_and_a_child_gives_nothing_back(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    locks = WriterLocks()
    first, second = locks.acquire(path, 0), locks.acquire(path, 0)
    child = os.fork()
    if child == 0:
        locks.release(first)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    locks.release(first)
    assert _refused(path)
    locks.release(second)
    assert not _refused(path) and os.listdir(tmp_path) == []


def _refused(path: Path) -> bool:
    program = HOLD.replace("time.sleep(60)", "locks.release(held)")
    with running(program, path) as other:
        line = other.stdout.readline()
        other.wait()
        return line != "held\n"


def test_what_lies_in_the_lock_s_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".run.npz.lock").symlink_to("precious")
    with pytest.raises(OSError):
        WriterLocks().acquire(tmp_path / "run.npz", 0)
    assert (tmp_path / "precious").read_text() == "precious"
