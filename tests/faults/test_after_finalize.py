"""A program that calls MPI.Finalize() itself: each later call is an error of one line, and the end is a clean one."""

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
                continue  # a rank that is alone was done at once
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
        ("os._exit(0)", 0, []),
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
