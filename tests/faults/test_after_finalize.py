"""A program that calls MPI.Finalize() itself: each later call raises a one-line error, and the program ends cleanly."""

from __future__ import annotations

import json

import pytest

from clcomm import Communicator, Synchronizer
from tests.faults.after_finalize import LOCAL, calls_of, calls_of_synchronizer
from tests.faults.launch import job

CLOSED = "Communicator: expected an open one, but MPI.Finalize() was called; call that last"
FINALIZED = "Communicator: expected an open one, but finalize() was called; make a new one"
ENDED = (
    "Communicator: expected MPI to run, but MPI.Finalize() was called; make it before, or use transport='solo'"
)  # fmt: skip
WHOLE = "from tests.faults.after_finalize import main as everything\neverything()\n"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_call_is_an_error_of_one_line(tmp_path, ranks):
    ended = job(tmp_path, WHOLE, ranks=ranks)
    assert (ended.code, ended.err) == (0, "")
    told = json.loads(ended.out)
    for of, calls in told.items():
        for name, error in calls.items():
            if of == "before" and ranks == 1 and name.startswith("wait"):
                continue  # complete at once on a single rank
            expected = {"new": ENDED, "finalized before": FINALIZED}.get(of, CLOSED)
            assert error == expected, f"{of}: {name}"


def test_every_public_name_is_called_or_known_to_be_local():
    with Communicator(transport="solo") as comm:
        called = {*calls_of(comm), *calls_of_synchronizer(Synchronizer(comm), None)}
    names = {name for kind in (Communicator, Synchronizer) for name in dir(kind) if not name.startswith("_")}
    assert names - called - LOCAL == set()


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("comm.barrier()", 1, [f"clcomm: rank {{rank}}: {CLOSED}"]),
        ("sys.exit(3)", 3, []),
        ("raise SystemExit(0)", 0, []),
        ("pass", 0, []),
    ],
)
def test_how_the_program_ends_after_it(tmp_path, statement, code, said):
    ended = job(tmp_path, f"from mpi4py import MPI\ncomm = Communicator()\nMPI.Finalize()\n{statement}\n", ranks=2)
    assert ended.code == code
    lines = ended.clcomm_lines() if said else ended.err.splitlines()
    assert "Traceback" not in ended.err and "MPICH" not in ended.err
    assert {line for line in lines if "left with exit code" not in line} <= {
        text.format(rank=rank) for text in said for rank in range(2)
    }
    assert bool(said) <= bool(lines)


@pytest.mark.parametrize(("stays_s", "code"), [(0, 0), (2, 0), (0, 5), (2, 5)])
def test_os_exit_after_it_is_never_blamed_on_another_rank(tmp_path, stays_s, code):
    """MPICH's mpiexec ends the ranks that still run: its library disconnects in the process's own exit handlers."""
    script = f"""
from mpi4py import MPI
comm = Communicator()
rank = comm.rank
MPI.Finalize()
time.sleep({stays_s} * (rank == 0))
os._exit({code} * (rank == 1))
"""
    ended = job(tmp_path, script, ranks=2)
    if code == 0 and ended.code == 0:
        assert ended.err == ""
        return
    assert ended.code != 0
    exits = [0, 1] if not stays_s else [1]
    (line,) = ended.clcomm_lines()
    assert line in [f"clcomm: rank {rank} exited unexpectedly with exit code {code * rank}" for rank in exits]
