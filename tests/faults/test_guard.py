"""`clcomm.guard`: a rank of a program of mpi4py alone fails, the others wait for it in MPI, and the job ends."""

from __future__ import annotations

import os
import re
import time

import pytest

from tests.faults.launch import END_S, Ended, job
from tests.test_imports import imported

WAYS = {
    "module": "program()",
    "watch": "import clcomm.guard\nclcomm.guard.watch()\nprogram()",
    "run": "import clcomm.guard\nclcomm.guard.run(program)",
}
#: How a rank fails, what of it is said, and the exit code where the launcher has no say; None: any but 0.
FAILS = {
    "raise ValueError('odd')": ("failed:", 1),
    "sys.exit(3)": ("left with exit code 3", 3),
    "os._exit(4)": ("exited unexpectedly with exit code 4", None),
    "os._exit(0)": ("exited unexpectedly with exit code 0", None),
    "os.kill(os.getpid(), signal.SIGKILL)": ("died of SIGKILL", None),
    "ctypes.string_at(0)": ("died of SIGSEGV", None),
}
#: Calls in which the others wait; the last is of the kind and size in which failing ranks compare their messages.
WAITS = (
    "comm.Barrier()", "comm.recv(source=bad)", "comm.allreduce(1)", "comm.Iallgather(bytearray(32), all).Wait()",
)  # fmt: skip
CASES = [
    (way, fails, wait)
    for number, (way, fails) in enumerate((way, fails) for fails in FAILS for way in WAYS)
    for wait in WAITS[number % 2 :: 2]
    if (way, fails) != ("watch", "sys.exit(3)")  # which only a function that calls the program sees
]

#: A program that can import neither NumPy nor OpenCL, and says what of it could be left behind.
PROGRAM = """
import ctypes, os, signal, sys, time
sys.modules.update(dict.fromkeys(("numpy", "pyopencl")))

def program():
    from mpi4py import MPI
    comm, bad = MPI.COMM_WORLD, {bad}
    all = bytearray(32 * comm.size)
    with open("/proc/self/maps") as maps:
        files = {{line.split()[5] for line in maps if "/dev/shm/" in line}}
    print("left:", os.getpid(), *files, flush=True)
    comm.Barrier()
    if comm.rank == bad:
        time.sleep(0.3)
        print("failing at", time.time(), file=sys.stderr, flush=True)
        {fails}
    {wait}
    print("went on", flush=True)
"""


def guarded(tmp_path, way: str, ranks: int = 2, **program) -> Ended:
    python = ("-m", "clcomm.guard") if way == "module" else ()
    return job(tmp_path, WAYS[way], ranks=ranks, preamble=PROGRAM.format(**program), python=python)


def nothing_is_left(ended: Ended, ranks: int) -> None:
    """Wait for the processes of the ranks to be gone, and look for their files."""
    found = [line.split()[1:] for line in re.findall("left: .*", ended.out)]
    assert len(found) == ranks, ended
    deadline = time.monotonic() + 60
    while left := [pid for pid, *_ in found if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"processes {left} still run"
        time.sleep(0.05)
    assert [path for _, *files in found for path in files if os.path.exists(path)] == []


@pytest.mark.sampled(7)
@pytest.mark.parametrize("way, fails, wait", CASES)
def test_a_rank_that_fails_ends_the_others_and_one_line_names_it(tmp_path, way, fails, wait):
    ranks = 2 + CASES.index((way, fails, wait)) % 3
    bad = len(wait) % ranks
    ended = guarded(tmp_path, way, ranks, bad=bad, fails=fails, wait=wait)
    says, code = FAILS[fails]
    assert ended.clcomm_lines() == [f"clcomm: rank {bad} {says}".replace(" left", ": left")], ended
    assert ended.code and code in (None, ended.code)
    assert "went on" not in ended.out
    assert ended.after_failing_s < END_S
    nothing_is_left(ended, ranks)


@pytest.mark.parametrize("way", WAYS)
def test_a_guarded_program_ends_as_it_would_alone(tmp_path, way):
    ended = guarded(tmp_path, way, 3, bad=9, fails="pass", wait="comm.Barrier()")
    assert (ended.code, ended.err, ended.out.count("went on")) == (0, "", 3)
    nothing_is_left(ended, 3)


def test_a_traceback_begins_with_the_program(tmp_path):
    for way in ("module", "run"):
        ended = guarded(tmp_path, way, bad=1, fails="raise ValueError('odd')", wait="comm.Barrier()")
        assert re.findall('File "(.*?)"', ended.err) == [str(tmp_path / "job.py")] * (2 if way == "module" else 1)


def test_a_module_is_run_and_a_script_that_is_missing_is_one_line(tmp_path):
    ended = job(tmp_path, "", preamble="", python=("-m", "clcomm.guard", "-m", "platform"), ranks=2)
    assert (ended.code, len(ended.out.splitlines())) == (0, 2)
    ended = job(tmp_path, "", preamble="", python=("-m", "clcomm.guard", "missing.py"), ranks=2)
    assert ended.clcomm_lines() == [
        f"clcomm: script: expected a Python script that exists, or -m MODULE, got 'missing.py {tmp_path / 'job.py'}'"
    ]
    assert ended.code == 2


def test_the_guard_imports_nothing_but_the_standard_library(tmp_path):
    changed, loaded = imported("clcomm.guard", "mpi4py.MPI")
    assert (changed, sorted(loaded)) == ([], ["clcomm", "clcomm._moved", "clcomm._version", "clcomm.guard"])
    body = """
import clcomm.guard
clcomm.guard.watch()
print({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"clcomm"} - BEFORE)
"""
    before = "import sys, mpi4py.MPI\nBEFORE = {name.partition('.')[0] for name in sys.modules}"
    assert job(tmp_path, body, ranks=2, preamble=before).out.split() == ["set()"] * 2


def test_watching_twice_and_without_a_launcher_is_once_and_nothing(tmp_path):
    body = "import clcomm.guard\nclcomm.guard.watch()\nclcomm.guard.watch()\nprogram()"
    for launcher in (True, False):
        program = PROGRAM.format(bad=9, fails="pass", wait="comm.Barrier()")
        ended = job(tmp_path, body, ranks=2, preamble=program, launcher=launcher)
        assert (ended.code, ended.err, ended.out.count("went on")) == (0, "", 1 + launcher)


def test_a_communicator_under_the_guard(tmp_path):
    """It finds the ranks watched, and names the one that leaves while the other waits in a collective."""
    body = "comm = Communicator()\ncomm.barrier()\nif comm.rank == 0:\n    comm.barrier()"
    ended = job(tmp_path, body, ranks=2, python=("-m", "clcomm.guard"))
    assert len(ended.clcomm_lines()) == 1 and ended.clcomm_lines()[0].startswith("clcomm: rank 1: "), ended
    assert ended.code
