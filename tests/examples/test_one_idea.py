"""The examples of one idea each, as a user runs them: what they print, and that each is short and says what it is."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.launch import HUNG_S, ROOT, clean_environment, mpiexec
from tests.faults.matrix import openmpi
from tests.multihost import two_hosts

FOLDER = ROOT / "examples" / "one_idea"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
NUMBER = r"\d[\d,]*(\.\d+)?"
PI = r"pi is about 3\.\d{6} after 2,400,000 points, with a standard error of 0\.00\d{4}"
KMEANS = r"2,000 points in groups of \d+, \d+, \d+, \d+, \d+"
STENCIL = r"after 100 steps: hottest 0\.\d{6}, sum \d+\.\d{6}, field [0-9a-f]{16}"
#: What two ranks print, or as many as RANKS says: for each pattern, how many lines match it.
PRINTED = {
    "hello": {r"rank (0|1) of 2, \1 on its host: sum \[3.0, 3.0, 3.0\], ranks \['rank 0', 'rank 1'\]": 2,
              r"all_reduce hello +1 .*": 1},
    "overlap": {r"overlap False: 0 of 80 buckets began during backward, 0\.0000 s hidden": 1,
                r"overlap True: [1-8]\d of 80 buckets began during backward, 0\.\d{4} s hidden": 1,
                "same bits: True": 2},
    "same_bits": {r"(one bucket|buckets of 16 KiB|per tensor|16 KiB)(, \w+)? +[0-9a-f]{64}": 6,
                  "same bits on 4 ranks in 6 ways: True": 1},
    "any_ranks": {r"[1-4] ranks? +[0-9a-f]{64}": 4, "same bits on 1 to 4 ranks: True": 1},
    "accumulation": {r"10 backwards: loss of this rank \d\.\d{4}, 10 all-reduces": 2,
                     r"40 backwards: loss of this rank \d\.\d{4}, 10 all-reduces": 2},
    "hooks": {r"rank [01]: sent 2,918,400 of 5,836,800 bytes; test accuracy [789]\d\.\d%": 2},
    "zero": {r"rank [01], stage 0: 142,376 bytes of gradients, 285,696 of Adam's state": 2,
             r"rank [01], stage 2: 71,680 bytes of gradients, 143,360 of Adam's state": 2,
             "same bits: True": 2},
    "mesh": {r"rank (0|1) at {'dp': 0, 'tp': \1}: 1386 of 2762 parameters; outputs of the whole model: True": 2,
             r"mesh dp=1 x tp=2: rank": 1},
    "pipeline": {r"rank 0: stage of 8320 parameters, loss 2\.\d+ at first, [01]\.\d+ at last": 1,
                 r"rank 1: stage of 4810 parameters, loss 2\.\d+ at first, [01]\.\d+ at last": 1,
                 r"rank 0  F0 F1 .*": 1},
    "torch_ddp": {r"rank [01] of 2: loss \d+\.\d+ at first, 0\.\d+ at last": 2, r"all_reduce gradients +60 .*": 1},
    "horovod_shim": {r"rank [01] of 2: mean loss 0\.0\d+; same weights: True": 2},
    "netcl_model": {r"rank [01] of 2: loss [01]\.\d+, {'total_allreduce_calls': 12, .*}": 2},
    "numpy_model": {r"rank [01] of 2: loss \d\.\de-\d+, weights \[0\.0, 1\.0, 2\.0, 3\.0, 4\.0, 5\.0, 6\.0, 7\.0\]": 2},
    "cartpole": {r"generation 30: mean of \d+ steps": 1, r"rank [01] of 2: up for [45]\d\d of 500 steps, policy .*": 2},
    "pi": {r"rank 0 of 2: 60 blocks, 0 on the ranks before it": 1,
           r"rank 1 of 2: 60 blocks, 60 on the ranks before it": 1, PI: 1},
    "kmeans": {r"rank [01] of 2: 1000 points, 14 steps, centres [0-9a-f]{16}": 2, KMEANS: 1},
    "stencil": {r"rank [01] of 2: rows 0 to 59, columns (0 to 23|24 to 47)": 2, STENCIL: 1,
                r"recv halo +200 .*": 1},
    "two_hosts": {r"1 host\(s\), ranks \[\[0, 1\], \[2, 3\]\], which stand in for hosts; all_reduce moved by shared": 1,
                  r"without: 262,144 of 262,144 bytes of each rank between hosts": 1,
                  r"with:    131,072 of 262,144 bytes of each rank between hosts": 1},
}  # fmt: skip
#: Those of another number of ranks than two.
RANKS = {"two_hosts": 4, "same_bits": 4, "any_ranks": 4}
#: Those that are started in another way, each with a test of its own.
OTHERS = {"elastic", "restart", "survives"}
NEEDS = {"torch_ddp": "torch", "horovod_shim": "torch", "netcl_model": "netcl", "hooks": "sklearn",
         "pipeline": "sklearn"}  # fmt: skip


def launch(
    command: Sequence[str], where: Path = ROOT, limit_s: float = HUNG_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=clean_environment(OMP_NUM_THREADS="1", **environment), capture_output=True, text=True,
        timeout=limit_s, check=False, stdin=subprocess.DEVNULL, cwd=where,
    )  # fmt: skip


def require_printed(expected: dict[str, int], out: str) -> None:
    """Fail unless so many lines match each pattern; of lines of one pattern, ranks' numbers differ."""
    for pattern, count in expected.items():
        found = [line for line in out.splitlines() if re.fullmatch(pattern, line.rstrip())]
        assert len(found) == count, f"{pattern}\n{out}"
        assert len(set(found)) == count or "rank" not in pattern.partition(" ")[0], out


def test_each_example_has_a_test() -> None:
    assert set(PROGRAMS) == set(PRINTED) | OTHERS
    assert len(PROGRAMS) + 1 >= 15  # examples/loop.py is the training loop of one's own


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PRINTED)
def test_ranks_print_what_it_says(name: str) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    ranks = str(RANKS.get(name, 2))
    ended = launch([mpiexec(), "-n", ranks, sys.executable, "-m", f"examples.one_idea.{name}"])
    assert (ended.returncode, ended.stderr) == (0, "")
    require_printed(PRINTED[name], ended.stdout)


def test_a_restarted_job_begins_at_its_checkpoint(tmp_path: Path) -> None:
    mpiexec()
    job = ["-n", "2", "-m", "examples.one_idea.restart"]  # without a file's name: in the current directory
    command = [sys.executable, "-m", "clcomm", "run", "--restarts", "1", "--pause", "0", *job]
    ended = launch(command, tmp_path, PYTHONPATH=str(ROOT))
    assert ended.returncode == 0, ended.stderr
    require_printed({r"rank [01]: start 1 begins at step 0": 2, r"rank [01]: start 2 begins at step 5": 2,
                     r"rank [01]: 12 steps, values \[12.0, 12.0, 12.0, 12.0\]": 2,
                     r"without the checkpoint 12 steps after the failure; with restart-state.npz 7": 1},
                    ended.stdout)  # fmt: skip
    assert (tmp_path / "restart-state.npz").exists()
    assert "exit code 1 at step 7; going on from step 5" in ended.stderr


def test_a_job_whose_ranks_are_killed_ends_with_the_undisturbed_bits() -> None:
    pytest.importorskip("sklearn")
    mpiexec()
    ended = launch(
        [sys.executable, "-m", "examples.one_idea.survives"], limit_s=3 * HUNG_S
    )  # four starts of four ranks
    assert ended.returncode == 0, ended.stderr + ended.stdout
    require_printed({r"(undisturbed|killed 2 x) +[0-9a-f]{64}": 2, "equal": 1,
                     r"chaos: fault [12]: kill rank [0-3] in step \d+, [\d.]+ s after its start": 2},
                    ended.stdout)  # fmt: skip


def test_elastic_ranks_go_on_without_the_lost_one() -> None:
    python = openmpi()
    if python is None:
        pytest.skip("no Open MPI: CLCOMM_TEST_OPENMPI names the Python of an environment with it")
    mpi = [str(python.with_name("mpiexec")), "--with-ft", "ulfm", "--oversubscribe", "-n", "3", str(python)]
    ended = launch([*mpi, "-m", "examples.one_idea.elastic"])
    require_printed({r"rank (0|1) goes on as rank \1 of 2 from step 1[01]": 2,
                     r"rank [01]: 20 steps, replicas alike on 2 ranks": 2}, ended.stdout)  # fmt: skip


@pytest.mark.skipif(openmpi() is not None, reason="this MPI may tolerate lost ranks")
def test_elastic_says_what_it_needs() -> None:
    ended = launch([mpiexec(), "-n", "2", sys.executable, "-m", "examples.one_idea.elastic"])
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("clcomm: elastic: expected Open MPI under mpiexec --with-ft ulfm")


def test_two_hosts_exchange_shares() -> None:
    reason = two_hosts.refusal()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    with two_hosts.TwoHosts() as hosts:
        command = hosts.command((2, 2), ["-m", "examples.one_idea.two_hosts"])
        ended = subprocess.run(
            command, cwd=ROOT, env=two_hosts.environment(), capture_output=True, text=True, timeout=HUNG_S
        )
    assert ended.returncode == 0, ended.stderr
    require_printed({r"2 host\(s\), ranks \[\[0, 1\], \[2, 3\]\]; all_reduce moved by hierarchical": 1,
                     r"without: 262,144 of 262,144 bytes of each rank between hosts": 1,
                     r"with:    131,072 of 262,144 bytes of each rank between hosts": 1}, ended.stdout)  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_short_and_says_what_it_is(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    idea, command, look, *_ = docstring.split("\n\n")
    assert idea.startswith("Idea: ") and look.startswith("Look at: ")
    assert f"-m examples.one_idea.{name}" in command
    assert text.count("\n") < 80
    assert f"one_idea/{name}.py" in (ROOT / "docs" / "example-programs.md").read_text()


def test_without_mpiexec_it_is_a_world_of_one() -> None:
    ended = launch([sys.executable, os.path.join("examples", "one_idea", "numpy_model.py")])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("rank 0 of 1: ")
