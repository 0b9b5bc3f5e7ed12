"""Failures of a reduction: no room in shared memory, ranges that do not fit, a rank that dies in it."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest

from tests.faults.launch import END_S, Ended, finish, job, start

#: Ranks that reduce arrays of their own and of the Communicator's, and print the transport used.
REDUCES = """
import numpy as np
from mpi4py import MPI
from tests.helpers import Recorder

def fill_shared_memory():
    with open("/dev/shm/in-the-way", "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 16))
            except OSError:
                return

def main():
    MPI.COMM_WORLD.Barrier()  # MPI has what it needs
    if {full} and MPI.COMM_WORLD.Get_rank() == 0:
        fill_shared_memory()
    MPI.COMM_WORLD.Barrier()
    comm = Communicator()
    observer = Recorder()
    comm.add_observer(observer)
    for nbytes in (4096, 40 << 20, 40 << 20):
        array = comm.allocate(nbytes).view(np.float32)
        array[:] = comm.rank + 1
        observer.events.clear()
        comm.all_reduce(array)
        assert (array == comm.size * (comm.size + 1) / 2).all()
        if comm.rank == 0:
            print(nbytes, *(event.transport for event in observer.events), flush=True)

run(main)
"""


@functools.cache
def refusal() -> str | None:
    """Return the reason why this process cannot mount a small file system on /dev/shm; None if it can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = subprocess.run([*SMALL, "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no rights to mount: {tried.stderr.strip()}"


#: Runs a command where /dev/shm has 64 MB, as in many containers.
SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")


@pytest.mark.parametrize("full", [False, True], ids=["64 MB", "full"])
def test_without_room_in_shared_memory_another_transport_takes_over_and_says_so_once(tmp_path, full):
    if refusal():
        pytest.skip(f"/dev/shm: {refusal()}")
    ended = finish(start(tmp_path, REDUCES.format(full=full), ranks=2, under=SMALL))
    assert ended.code == 0, ended.err
    small, large = ("mpi", "mpi") if full else ("shared", "staged")
    assert ended.out.splitlines() == [f"4096 {small}", f"{40 << 20} {large}", f"{40 << 20} {large}"]
    said = [line for line in ended.err.splitlines() if "/dev/shm has no room" in line]
    assert len(said) == len(ended.err.splitlines()) == 1, ended.err


DIES = """
import signal, threading
import numpy as np

def die():
    time.sleep(0.2)
    failing()
    os.kill(os.getpid(), signal.SIGKILL)

def main():
    if {sleeps}:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # ranks that share a core sleep when they wait
    comm = Communicator(transport={transport!r})
    array, out = comm.allocate(1 << 20).view(np.float32), comm.allocate_common(1 << 20).view(np.float32)
    reduce = comm.all_reduce_init(array, "mean", out=out)
    begin = comm.all_reduce_async_init(array, "mean", out=out)
    reduce()
    if comm.rank == 1:
        threading.Thread(target=die, daemon=True).start()
    while True:
        {statement}

run(main)
"""
REDUCTIONS = {
    "prepared": "reduce()",
    "unprepared": 'comm.all_reduce(array, "mean", out=out)',
    "started": 'comm.all_reduce_async(array, "mean", out=out).wait()',
    "prepared and started": "begin().wait()",
    "prepared and started, on one core": "begin().wait()",
}


@pytest.mark.parametrize("transport", ["auto", "mpi"])
@pytest.mark.parametrize("way", REDUCTIONS)
def test_a_rank_that_is_killed_inside_a_reduction_ends_the_others(tmp_path, way, transport):
    ended: Ended = job(tmp_path, DIES.format(transport=transport, statement=REDUCTIONS[way], sleeps="core" in way))
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    assert "Traceback" not in ended.err
