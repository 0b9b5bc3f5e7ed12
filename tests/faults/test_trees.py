"""Drawn trees of processes that ranks start: nobody signals a process of others, and what is said is true.

CLCOMM_TREES says how many; `make trees` has 200.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.faults.launch import ROOT, clean_environment, mpiexec
from tests.faults.tree_job import HUNG_S, KINDS, MOMENTS, REFUSED

pytestmark = [pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")]

#: How many trees are drawn: two to four for each job.
TREES = int(os.environ.get("CLCOMM_TREES", "6"))
#: Ways to start the ranks; in the shell's they are no launcher's children.
PLAIN, SHELL = "mpiexec", "a shell on each rank"
#: Kinds that take seconds, and are drawn less often.
SLOW = "loader", "command", "mpiexec", "mpiexec that fails"


def drawn_jobs() -> Iterator[tuple[int, str, bool, list[list[tuple[str, str, int]]]]]:
    """Yield jobs: their seed, how they are started, whether they import clcomm.torch, and each rank's tree."""
    trees, seed = 0, int(os.environ.get("CLCOMM_TREES_SEED", "0"))
    while trees < TREES:
        draw = random.Random(seed)
        kinds = [kind for kind in KINDS for _ in range(1 if kind in SLOW else 3)]
        ranks = [
            [
                (draw.choice(MOMENTS), draw.choice(kinds), draw.choice([0, 1, 2, 3, -9, -15, -12]))
                for _ in range(draw.randint(1, 3))
            ]
            for _ in range(draw.randint(2, 4))
        ]
        yield seed, SHELL if draw.random() < 0.2 else PLAIN, draw.random() < 0.1, ranks
        trees, seed = trees + len(ranks), seed + 1


@pytest.mark.timeout(3 * HUNG_S)
@pytest.mark.parametrize("job", list(drawn_jobs()), ids=lambda job: f"seed {job[0]}")
def test_what_ranks_start_ends_as_it_wants_and_ends_nobody(job) -> None:
    _, how, has_torch, trees = job
    if has_torch or any(kind == "loader" for tree in trees for _, kind, _ in tree):
        pytest.importorskip("torch")
    program = [sys.executable, "-m", "tests.faults.tree_job", json.dumps(trees)]
    around = ["sh", "-c", '"$@"; exit $?', "sh"] if how == SHELL else []
    environment = clean_environment(CLCOMM_STALL_WARNING_S="0", **{"TREE_TORCH": "1"} if has_torch else {})
    with subprocess.Popen(["sleep", str(10 * HUNG_S)]) as outside:
        try:
            ended = subprocess.run(
                [mpiexec(), "-n", str(len(trees)), *around, *program], cwd=ROOT, capture_output=True, text=True,
                timeout=2 * HUNG_S, check=False, env=environment,
            )  # fmt: skip
            said = (ended.returncode, ended.stdout, ended.stderr)
            assert said == (0, json.dumps([[] for _ in trees]) + "\n", ""), trees
            assert outside.poll() is None
        finally:
            outside.kill()


def test_in_a_shell_that_has_a_launchers_variables_its_other_jobs_live(tmp_path) -> None:
    """Of no launcher are these, so nobody but the script is a rank."""
    script = tmp_path / "fails.py"
    script.write_text("import clcomm.comm.communicator; raise SystemExit(3)")
    shell = f"sleep {HUNG_S} & {sys.executable} {script}; echo $?; sleep 3; kill $!; wait $!; echo $?"
    ended = subprocess.run(
        ["sh", "-c", shell], env=clean_environment(PMI_RANK="0", PMI_SIZE="2"), capture_output=True, text=True,
        timeout=HUNG_S, check=False,
    )  # fmt: skip
    assert ended.stdout == "3\n143\n"
    assert "clcomm" not in ended.stderr


@pytest.mark.parametrize("ends", [3, -9])
def test_a_rank_that_fails_early_ends_the_ranks_and_nothing_else(tmp_path, ends) -> None:
    """Its children are no ranks, and neither is what another rank has started."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "import clcomm.comm.communicator\n"
        f"helper = subprocess.Popen(['sleep', '{HUNG_S}'], start_new_session=True, stdout=-3, stderr=-3)\n"
        "sys.stdout.write(f'{helper.pid}\\n'); sys.stdout.flush()\n"
        "if '0' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')):\n"
        f"    time.sleep(2); {f'os.kill(os.getpid(), {-ends})' if ends < 0 else f'os._exit({ends})'}\n"
        "clcomm.comm.communicator.Communicator()\n"
    )
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        code = subprocess.run(
            [mpiexec(), "-n", "3", sys.executable, str(script)], env=clean_environment(), stdout=out, stderr=err,
            timeout=HUNG_S, check=False,
        ).returncode  # fmt: skip
        out.seek(0)
        helpers = [int(word) for word in out.read().split() if word.isdigit()][:3]  # before MPICH's own lines
    try:
        assert code and len(helpers) == 3
        assert all(os.path.exists(f"/proc/{helper}") for helper in helpers)
    finally:
        for helper in helpers:
            os.kill(helper, 15)


def test_what_is_refused_is_one_line() -> None:
    assert REFUSED in (ROOT / "docs/robustness.md").read_text()
